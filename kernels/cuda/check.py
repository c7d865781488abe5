#!/usr/bin/env python3
"""Compiles every kernel that is shipped, for every architecture, without a GPU, and compares the
resources with kernels/cuda/table.md. Needs a virtual environment with the packages of
kernels/cuda/requirements.txt: NVRTC and ptxas 12 (what ships), nvcc 13 (a second opinion).

    check.py            compile, fail on spills, differences of the table or of the prebuilt PTX
    check.py --write    compile and write the table and the prebuilt PTX
"""

import ctypes
import glob
import gzip
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
ARCHES = (80, 90, 100)
DIMS = (64, 80, 96, 128, 256)
TYPES = ("f32", "f16", "bf16", "e4m3", "int8")
BYTES = (4, 2, 2, 1, 1)
GENERAL = ("prelude.cu", "blocks.cu", "general.cu", "sample.cu")
ATTENTION = ("prelude.cu", "attention.cu")
# Of a weight in blocks.
BLOCK_BYTES = {"q4_0": 18 / 32, "q4_1": 20 / 32, "q8_0": 34 / 32}
BLOCK_BYTES |= {"q5_0": 22 / 32, "q5_1": 24 / 32, "iq4_nl": 18 / 32}
BLOCK_BYTES |= {"q4_k": 144 / 256, "q5_k": 176 / 256, "q6_k": 210 / 256}
# Of the prebuilt code, so that drivers from CUDA 11.4 on take it.
PTX_VERSION = "7.4"
# Of an SM: registers, threads, shared memory a block can be given, blocks.
LIMITS = {80: (65536, 2048, 164, 32), 90: (65536, 2048, 228, 32), 100: (65536, 2048, 228, 32)}


def modules():
    yield "general", GENERAL, []
    for dim in DIMS:
        for number, name in enumerate(TYPES):
            options = [f"-DHEAD_DIM={dim}", f"-DKV_TYPE={number}"]
            yield f"{name}/{dim}", ATTENTION, options


def source(files):
    return "".join((HERE / name).read_text() for name in files)


class Nvrtc:
    def __init__(self):
        found = glob.glob(str(SITE / "cuda_nvrtc/lib/libnvrtc.so.12*"))
        self.lib = ctypes.CDLL(found[0])
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def ptx(self, text, options):
        lib, program, size = self.lib, ctypes.c_void_p(), ctypes.c_size_t()
        lib.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"rootstock.cu", 0, None, None
        )
        given = [option.encode() for option in options]
        code = lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        if code != 0 or b"warning" in log.value:
            raise SystemExit(log.value.decode())
        lib.nvrtcGetPTXSize(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetPTX(program, out)
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return out.value.decode()


def tool(path):
    path = SITE / path
    path.chmod(path.stat().st_mode | 0o111)
    return str(path)


def resources(log):
    """Kernel -> (registers, static shared bytes, spilled bytes) of a log of ptxas -v."""
    found, kernel, spilled = {}, None, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[kernel] = (int(match[1]), int(shared[1]) if shared else 0, spilled)
    return found


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def options_for(arch, options):
    return [f"--gpu-architecture=compute_{arch}", "--std=c++17", "-default-device", *options]


def compile_one(job):
    name, files, options, arch, compiler, folder = job
    text = source(files)
    stem = f"{folder}/{name.replace('/', '-')}-{arch}"
    if compiler == "nvcc":
        Path(f"{stem}.cu").write_text(text)
        nvcc = [tool("cu13/bin/nvcc"), "-std=c++17", "-O3", f"-arch=sm_{arch}", "-cubin", *options]
        log = run([*nvcc, "-Xptxas", "-v", "-o", f"{stem}.cubin", f"{stem}.cu"])
        return name, arch, resources(log), None
    ptx = NVRTC.ptx(text, options_for(arch, options))
    if arch == 80:
        # What ships; the assembler refuses what this version does not have.
        ptx = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", ptx, flags=re.M)
    Path(f"{stem}.ptx").write_text(ptx)
    ptxas = [tool("cuda_nvcc/bin/ptxas"), f"-arch=sm_{arch}", "-v"]
    log = run([*ptxas, "-o", f"{stem}.cubin", f"{stem}.ptx"])
    return name, arch, resources(log), ptx if arch == 80 else None


def dynamic_shared(kernel, dim, number):
    """Bytes that `kernels/src/cuda/launch.rs` asks for."""
    if kernel.startswith("product_tiles"):
        return 2 * 64 * 40 * 2
    if kernel.startswith("attention_decode"):
        part = 16 if number >= 3 else 8
        lanes = next(n for n in (4, 8, 16, 32) if dim // part <= n)
        return 4 * (32 // lanes) * int(kernel.rsplit("_", 1)[1]) * (dim + 2) * 4
    if kernel == "attention_prefill":
        keys = 64 if dim <= 128 else 32
        return (2 * keys + 64) * (dim + 8) * 2
    return 0


def occupancy(arch, threads, registers, shared):
    registers_max, threads_max, shared_max, blocks_max = LIMITS[arch]
    a_warp = -(-registers * 32 // 256) * 256
    warps = threads // 32
    by_registers = registers_max // a_warp // warps
    by_shared = shared_max * 1024 // (shared + 1024)
    blocks = min(by_registers, by_shared, threads_max // threads, blocks_max)
    return blocks * warps * 100 // (threads_max // 32)


def attention_traffic(kernel, dim, number):
    """The same for attention: 4096 positions of one KV head, f32 queries and results."""
    row = dim * BYTES[number] + (4 if number >= 3 else 0)
    context, heads = 4096, 4
    splits = context // 512
    if kernel == "store_kv":
        # A token of 32 query heads and 8 KV heads; each head asks for the angles.
        queries, stored = 32 * dim * 8, 16 * (dim * 4 + row)
        return queries + stored + 40 * dim * 4, queries + stored + dim * 4
    if kernel == "attention_merge":
        # Each thread looks at the sums of all splits, twice at the largest score.
        return splits * dim * 16 + dim * 4, splits * (dim + 2) * 4 + dim * 4
    if kernel.startswith("attention_decode"):
        # As many query heads as the kernel takes; a partial result a split, written and read.
        heads = int(kernel.rsplit("_", 1)[1])
        least = 2 * context * row + 2 * heads * dim * 4
        return least + 2 * splits * heads * (dim + 2) * 4 + splits * heads * dim * 4, least
    # Prefill: one head reads all keys up to its own once a tile of 64 queries; least: all once.
    queries = 2 * context * heads * dim * 4
    tiles = sum(2 * 64 * (i + 1) * row for i in range(context // 64))
    return heads * tiles + queries, 2 * context * row + queries


def traffic(kernel, dim, number):
    """Bytes asked of memory and the least possible, at a typical shape; None: of no interest."""
    if dim:
        return attention_traffic(kernel, dim, number)
    rows, cols, tokens = 14336, 4096, 512
    if kernel.startswith("product_rows"):
        # One token; two rows of weights a warp, each warp asks for the token.
        bytes_ = {"f32": 4, "f16": 2, "bf16": 2}.get(kernel.removeprefix("product_rows_"))
        if bytes_ is None:
            bytes_ = BLOCK_BYTES[kernel.removeprefix("product_rows_")]
        least = rows * cols * bytes_ + (rows + cols) * 4
        return rows * cols * bytes_ + rows // 2 * cols * 4 + rows * 4, least
    if kernel.startswith("product_tiles"):
        # Tiles of 64 rows and 64 tokens.
        bytes_ = BLOCK_BYTES.get(kernel.removeprefix("product_tiles_"), 2)
        tiles = int(rows // 64 * (tokens // 64) * 64 * cols * (bytes_ + 4))
        out = rows * tokens * 4
        return tiles + out, rows * cols * bytes_ + cols * tokens * 4 + out
    # The norm reads its row twice; the others touch each byte once.
    once = {"rms_norm": (12, 8), "silu_mul": (12, 12), "embed": (6, 6)}
    once |= {"pages_gather": (2, 2), "pages_scatter": (2, 2), "feed": (16, 16)}
    once |= {"narrow": (6, 6), "take_apart": (2, 2)}
    return once.get(kernel)


def threads_of(files):
    found = re.findall(r"^KERNEL\((\w+), \w+, (\d+)[,)]", source(files), re.M)
    return {name: int(threads) for name, threads in found}


def table(results, nvrtc):
    lines = [
        "# Resources of the kernels",
        "",
        "Written by `check.py --write`, compared in CI. Registers a thread, static and dynamic",
        "shared memory a block, and the share of an SM's warps that fit at once (by arithmetic",
        f"from these). NVRTC and ptxas {nvrtc}; spilled bytes are an error. Traffic: bytes that the",
        "kernel asks of the memory system against the least possible, at the shapes of `traffic`",
        "in check.py; caches serve most of what is asked for more than once.",
        "",
        "| module | kernel | regs 80/90/100 | shared | spills | occupancy 80/90/100 | traffic |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, files, _ in modules():
        threads = threads_of(files)
        kind, _, dim = name.partition("/")
        number = TYPES.index(kind) if dim else 0
        for kernel in sorted(results[name, ARCHES[0]]):
            rows = [results[name, arch][kernel] for arch in ARCHES]
            dynamic = dynamic_shared(kernel, int(dim or 0), number)
            shared = rows[0][1] + dynamic
            registers = " / ".join(str(row[0]) for row in rows)
            shares = " / ".join(
                f"{occupancy(arch, threads[kernel], row[0], row[1] + dynamic)} %"
                for arch, row in zip(ARCHES, rows)
            )
            spills = max(row[2] for row in rows)
            asked = traffic(kernel, int(dim or 0), number)
            ratio = f"{asked[0] / asked[1]:.2f}" if asked else ""
            lines.append(
                f"| {name} | {kernel} | {registers} | {shared} | {spills} | {shares} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


def prebuilt(ptx):
    """All modules for compute_80 in one text, each behind a line that names it."""
    parts = []
    for name, _, options in modules():
        text = re.sub(r"^//.*\n", "", ptx[name], flags=re.M).strip()
        parts.append(f"//module {' '.join(options)}\n{text}\n")
    return "".join(parts)


def main():
    write = "--write" in sys.argv
    results, ptx, spills = {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (*module, arch, compiler, folder)
            for module in modules()
            for arch in ARCHES
            for compiler in ("nvrtc", "nvcc")
            # The second compiler sees every source once an architecture, and writes nothing.
            if compiler == "nvrtc"
            or (not write and module[0] in ("general", "f16/128", "int8/64"))
        ]
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            for job, done in zip(jobs, pool.map(compile_one, jobs)):
                name, arch, kernels, text = done
                for kernel, (registers, _, spilled) in kernels.items():
                    if spilled:
                        spills.append(f"{name} {kernel} sm_{arch} {job[4]}: {spilled} bytes")
                if job[4] == "nvrtc":
                    results[name, arch] = kernels
                    if text:
                        ptx[name] = text
    print(f"{len(jobs)} modules compiled and assembled", flush=True)
    new = table(results, NVRTC.version)
    packed = gzip.compress(prebuilt(ptx).encode(), 9, mtime=0)
    kept, stored = HERE / "table.md", HERE / "compute_80.ptx.gz"
    if write:
        kept.write_text(new)
        stored.write_bytes(packed)
    wrong = []
    if not kept.exists() or kept.read_text() != new:
        wrong.append("kernels/cuda/table.md is not of these sources: run check.py --write")
    if not stored.exists() or gzip.decompress(stored.read_bytes()) != gzip.decompress(packed):
        wrong.append("kernels/cuda/compute_80.ptx.gz is not of these sources: check.py --write")
    wrong += [f"spilled registers: {spill}" for spill in spills]
    print("\n".join(wrong) or "no spills, the table and the prebuilt PTX are of these sources")
    sys.exit(1 if wrong else 0)


NVRTC = Nvrtc()
if __name__ == "__main__":
    main()
