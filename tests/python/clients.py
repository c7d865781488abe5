"""Released client libraries against the real server, on the default model.

Each library: a plain answer, a stream that equals it, a forced tool call, and a second turn that
finds the first one in the cache, up to a page. Prints results in the form of Rust's test harness.
"""

import asyncio
import json
import re
import subprocess
import sys
import traceback

PAGE = 16
SYSTEM = "You are a helpful assistant that answers in one short sentence. " * 4
LOOK = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# The SDK of Anthropic has no argument for it any more.
GREEDY = {"temperature": 0}
TESTS = []


def test(function):
    TESTS.append(function)
    return function


def serve(binary):
    """Starts the server on a free port; its address is in its first lines."""
    server = subprocess.Popen(
        [binary, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in server.stdout:
        found = re.search(r"http://[0-9.:]+\d", line)
        if found:
            return server, found.group(0)
    raise SystemExit("skipped: the server did not start (is the model to be had?)")


def check_arguments(arguments):
    assert arguments["city"] in ("Paris", "Rome") and arguments["days"] in (1, 2, 3), arguments


def check_cached(cached, history):
    assert cached + PAGE > history, f"{cached} of {history} tokens were found"


@test
def openai_chat(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi."}]
    ask = dict(model="gpt-any", messages=messages, temperature=0, max_tokens=24)
    plain = client.chat.completions.create(**ask)
    assert plain.model == "gpt-any"
    chunks = list(
        client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content, text
    history = plain.usage.prompt_tokens + plain.usage.completion_tokens
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]
    second = client.chat.completions.create(**ask)
    check_cached(second.usage.prompt_tokens_details.cached_tokens, history - 1)


@test
def openai_tools(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    tool = {"type": "function", "function": {"name": "weather", "parameters": LOOK}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    ask = dict(
        model="m", messages=messages, tools=[tool], temperature=0, max_tokens=200,
        parallel_tool_calls=False,
    )
    plain = client.chat.completions.create(**ask, tool_choice="required")
    call = plain.choices[0].message.tool_calls[0]
    check_arguments(json.loads(call.function.arguments))
    with client.chat.completions.stream(**ask, tool_choice="required") as stream:
        final = stream.get_final_completion()
    again = final.choices[0].message.tool_calls[0].function
    assert (again.name, again.arguments) == (call.function.name, call.function.arguments)
    history = plain.usage.prompt_tokens + plain.usage.completion_tokens
    messages += [
        plain.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = client.chat.completions.create(**ask)
    check_cached(second.usage.prompt_tokens_details.cached_tokens, history - 1)


@test
def openai_schema(base):
    import openai
    from pydantic import BaseModel

    class Trip(BaseModel):
        city: str
        sunny: bool

    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    messages = [{"role": "user", "content": "Where to go? Name one city."}]
    answer = client.chat.completions.parse(
        model="m", messages=messages, response_format=Trip, temperature=0, max_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


@test
def openai_responses(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    ask = dict(model="m", temperature=0, max_output_tokens=24)
    plain = client.responses.create(input="Say hello. " * 10, **ask)
    with client.responses.stream(input="Say hello. " * 10, **ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == plain.output_text
    second = client.responses.create(input="And?", previous_response_id=plain.id, **ask)
    check_cached(second.usage.input_tokens_details.cached_tokens, plain.usage.total_tokens - 1)
    tool = {"type": "function", "name": "weather", "parameters": LOOK, "strict": True}
    called = client.responses.create(
        input="Weather in Rome?", tools=[tool], tool_choice="required", model="m",
        temperature=0, max_output_tokens=200, parallel_tool_calls=False,
    )
    check_arguments(json.loads(called.output[0].arguments))


@test
def anthropic_messages(base):
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key="none")
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": "Hello."}]
    ask = dict(model="claude-any", max_tokens=24, system=system, extra_body=GREEDY)
    plain = client.messages.create(messages=messages, **ask)
    with client.messages.stream(messages=messages, **ask) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == plain.content[0].text
    assert final.model == "claude-any"
    counted = client.messages.count_tokens(model="m", system=system, messages=messages)
    usage = plain.usage
    total = (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )
    assert total == counted.input_tokens, (total, counted)
    messages += [
        {"role": "assistant", "content": plain.content},
        {"role": "user", "content": "And?"},
    ]
    second = client.messages.create(messages=messages, **ask)
    check_cached(second.usage.cache_read_input_tokens, total + usage.output_tokens - 1)


@test
def anthropic_tools(base):
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key="none")
    tool = {"name": "weather", "description": "tells it", "input_schema": LOOK}
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    ask = dict(model="m", max_tokens=200, tools=[tool], extra_body=GREEDY)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(messages=messages, tool_choice=choice, **ask)
    block = called.content[0]
    assert called.stop_reason == "tool_use" and block.name == "weather"
    check_arguments(block.input)
    usage = called.usage
    history = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
    ]
    second = client.messages.create(messages=messages, **ask)
    check_cached(second.usage.cache_read_input_tokens, history - 1)


def langchain_round(llm, cached_of):
    """The same three things through any LangChain chat model."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    messages = [SystemMessage(SYSTEM), HumanMessage("Good day.")]
    plain = llm.invoke(messages)
    streamed = None
    for chunk in llm.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == plain.text, (streamed, plain)
    usage = plain.usage_metadata
    messages += [AIMessage(plain.text), HumanMessage("And?")]
    second = llm.invoke(messages)
    check_cached(cached_of(second), usage["input_tokens"] + usage["output_tokens"] - 1)


def langchain_call(llm, choice):
    tool = {"title": "weather", "description": "tells it", **LOOK}
    called = llm.bind_tools([tool], tool_choice=choice).invoke("Weather in Paris?")
    check_arguments(called.tool_calls[0]["args"])


def cache_read(message):
    return message.usage_metadata["input_token_details"]["cache_read"]


@test
def langchain_openai(base):
    from langchain_openai import ChatOpenAI

    make = lambda tokens: ChatOpenAI(
        model="m", base_url=base + "/v1", api_key="none", temperature=0, max_tokens=tokens
    )
    langchain_round(make(24), cache_read)
    langchain_call(make(200), "required")


@test
def langchain_anthropic(base):
    from langchain_anthropic import ChatAnthropic

    make = lambda tokens: ChatAnthropic(
        model="m", base_url=base, api_key="none", temperature=0, max_tokens=tokens
    )
    langchain_round(make(24), cache_read)
    langchain_call(make(200), "any")


@test
def langchain_nvidia_dynamo(base):
    from langchain_nvidia_ai_endpoints import ChatNVIDIADynamo

    llm = ChatNVIDIADynamo(
        model="m", base_url=base + "/v1", api_key="none", temperature=0, max_tokens=24,
        priority=3, latency_sensitivity=1.5,
    )
    details = lambda message: message.response_metadata["token_usage"]["prompt_tokens_details"]
    langchain_round(llm, lambda message: details(message)["cached_tokens"])


@test
def langgraph_agent(base):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        return "sunny"

    llm = ChatOpenAI(
        model="m", base_url=base + "/v1", api_key="none", temperature=0, max_tokens=60
    )
    agent = create_react_agent(llm, [weather])
    end = agent.invoke({"messages": [("user", "Say hello.")]}, {"recursion_limit": 12})
    assert end["messages"][-1].type == "ai"


@test
def openai_agents(base):
    import agents
    import openai

    agents.set_tracing_disabled(True)

    async def session(make):
        client = openai.AsyncOpenAI(base_url=base + "/v1", api_key="none")
        settings = agents.ModelSettings(temperature=0, max_tokens=24)
        agent = agents.Agent(
            name="a", instructions=SYSTEM, model_settings=settings,
            model=make(model="m", openai_client=client),
        )
        plain = await agents.Runner.run(agent, "Hello there.")
        assert plain.final_output
        run = agents.Runner.run_streamed(agent, "Hello there.")
        async for _ in run.stream_events():
            pass
        assert run.final_output == plain.final_output
        await client.close()

    asyncio.run(session(agents.OpenAIChatCompletionsModel))
    asyncio.run(session(agents.OpenAIResponsesModel))


def main():
    server, base = serve(sys.argv[1])
    failed = []
    try:
        for run in TESTS:
            try:
                run(base)
                print(f"test python::{run.__name__} ... ok", flush=True)
            except Exception:
                failed.append(run.__name__)
                print(f"test python::{run.__name__} ... FAILED", flush=True)
                traceback.print_exc()
    finally:
        server.terminate()
        server.wait()
    word = "FAILED" if failed else "ok"
    passed = len(TESTS) - len(failed)
    print(f"test result: {word}. {passed} passed; {len(failed)} failed; 0 ignored;")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
