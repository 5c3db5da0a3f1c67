"""The demo pair here and in mlx-dspark, the public MLX engine for the same drafters, side by side.

    python3 -m venv build/peer && build/peer/bin/pip install 'mlx[cpu]' mlx-dspark
    python benchmarks/against_mlx_dspark.py --peer build/peer/bin/python [--prompts 0,1] [--tokens 200]

Two processes, one for each engine, take turns prompt by prompt on the same float32 weights, the same token
ids and the same BLAS, greedy, decode only. Both verify whole blocks without lookup, so that accept lengths
compare. `ours` is this program as it comes, where the draft length follows measured costs; `float32` has
mlx-dspark's drafter in the precision that ours has, `4-bit` as mlx-dspark loads it by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REFERENCE = HERE.parent / "tests" / "data" / "reference.json"
DRAFTERS = HERE.parent / "engine" / "demo_drafters"
FOLDERS = {
    "dspark": "SmolLM2-135M-Instruct-DSpark-b7",
    "dflash": "SmolLM2-135M-Instruct-DFlash-b8",
    "dflash2": "SmolLM2-135M-Instruct-DFlash2-b8",
}
OURS = ("ours", "ours, whole blocks")
PEERS = ("mlx-dspark, float32", "mlx-dspark, 4-bit")
Answer = Callable[[str, str, list[int], int], dict[str, Any]]


def ours(target: str) -> Answer:
    """Answers by this program."""
    import demo

    from dspark_tui.engine.models.resolve import resolve

    session = demo.open_target(resolve(target))

    def answer(arm: str, method: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        session.adaptive = arm == OURS[0]
        session.select(method)
        reply = demo.answer(session, prompt, tokens)
        return {
            "ids": list(reply.tokens),
            "rounds": len(reply.rounds),
            "rate": reply.tokens_per_second,
        }

    return answer


def peer(target: str) -> Answer:
    """Answers by mlx-dspark."""
    ctypes.CDLL(os.environ["BENCHMARK_BLAS"], mode=ctypes.RTLD_GLOBAL)
    import mlx.core as mx
    from mlx_dspark import dflash_generate, greedy_generate, load_dflash, load_drafter, load_target
    from mlx_dspark import speculative_generate as dspark_generate

    model, tokenizer = load_target(target, require_tap=True)
    loaded: dict[tuple[str, str], Any] = {}

    def drafter(arm: str, method: str) -> Any:
        if (arm, method) not in loaded:
            load = load_drafter if method == "dspark" else load_dflash
            module = load(str(Path(target).parent / method), quantize=arm == PEERS[1])[0]
            if arm == PEERS[0]:
                module.set_dtype(mx.float32)
            mx.eval(module.parameters())
            loaded[arm, method] = module
        return loaded[arm, method]

    def answer(arm: str, method: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        options: dict[str, Any] = {"prompt_ids": prompt, "max_new_tokens": tokens}
        if method == "none":
            result = greedy_generate(model, tokenizer, **options)
        else:
            generate = dspark_generate if method == "dspark" else dflash_generate
            options |= {"max_draft_tokens": None, "lookup_drafts": False}
            result = generate(model, tokenizer, drafter(arm, method), **options)
        # Its last block may go beyond the limit; here the block is cut there.
        ids = list(result.token_ids)[:tokens]
        return {
            "ids": ids,
            "rounds": result.num_rounds,
            "rate": (len(ids) - 1) / result.decode_seconds,
        }

    return answer


def serve(answer: Answer) -> None:
    """Answers the requests on stdin, one JSON line each, on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)


class Engine:
    """One of the two processes."""

    def __init__(self, python: str, role: str, target: Path, environment: dict[str, str]) -> None:
        command = [python, __file__, "--role", role, "--target", str(target)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The process {self._process.args} ended before it answered.")
        reply: dict[str, Any] = json.loads(line)
        return reply


def write_float32(folder: Path) -> None:
    """The demo target with float32 weights, so that neither engine has a precision of its own."""
    import demo
    import mlx.core as mx
    from mlx.utils import tree_flatten

    target = demo.open_demo().target
    source = Path(target.info.path)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    parameters: Any = tree_flatten(target.model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters), metadata={"format": "mlx"})


def write_wide(source: Path, folder: Path) -> None:
    """A bundled drafter, which is stored in 8 bits, as a published one is: the numbers it stands for."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    how = config.pop("quantization")
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    stored: Any = mx.load(str(source / "model.safetensors"))
    wide = {}
    for name, value in stored.items():
        base = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{base}.scales" in stored:
            parts = [stored[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases")]
            value = mx.dequantize(value, *parts, group_size=how["group_size"], bits=how["bits"])
        wide[base if base.endswith("_codebook") else name] = value.astype(mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), wide, metadata={"format": "mlx"})


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", help="a python that has mlx-dspark")
    parser.add_argument("--prompts", default="", help="comma-separated numbers, all ten by default")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--role", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        serve((ours if options.role == "ours" else peer)(options.target))
        return
    if not options.peer:
        parser.error("give --peer, the python of an environment with mlx-dspark (see --help)")
    import demo

    weights = HERE.parent / "build" / "benchmark" / "demo-float32"
    if not (weights / "model.safetensors").is_file():
        write_float32(weights)
        for method, name in FOLDERS.items():
            write_wide(DRAFTERS / name, weights.parent / method)
    environment = dict(os.environ, BENCHMARK_BLAS=str(demo.BLAS.path))
    own = Engine(sys.executable, "ours", weights, environment)
    other = Engine(options.peer, "peer", weights, environment)
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    rows = [reference[int(i)] for i in options.prompts.split(",") if i] or reference

    arms = [(method, arm) for method in ("none", *FOLDERS) for arm in (*OURS, *PEERS)]
    arms = [a for a in arms if a[0] != "none" or a[1] in (OURS[0], PEERS[0])]
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {arm: [] for arm in arms}

    def run(method: str, arm: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        engine = own if arm in OURS else other
        return engine.ask(arm=arm, method=method, prompt=prompt, tokens=tokens)

    for method, arm in arms:  # warm up
        run(method, arm, rows[0]["prompt_ids"], 12)
    for number, row in enumerate(rows):
        shift = number % len(arms)
        for method, arm in arms[shift:] + arms[:shift]:
            result = run(method, arm, row["prompt_ids"], options.tokens)
            result["equal"] = result["ids"] == row["output_ids"][: options.tokens]
            result["accept"] = (len(result["ids"]) - 1) / max(1, result["rounds"])
            seen[method, arm].append(result)
        print(f"{number + 1} of {len(rows)} prompts", file=sys.stderr)

    print("| | | tokens/s (mean) | against mlx-dspark, float32 (median) | accept length | equal |")
    print("|---|---|---|---|---|---|")
    for method, arm in arms:
        results, base = seen[method, arm], seen[method, PEERS[0]]
        rates = [result["rate"] for result in results]
        ratios = [a["rate"] / b["rate"] for a, b in zip(results, base, strict=True)]
        accept = "1" if method == "none" else f"{statistics.mean(r['accept'] for r in results):.2f}"
        print(
            f"| {method} | {arm} | {statistics.mean(rates):.1f} | {demo.spread(ratios)} | {accept} "
            f"| {sum(r['equal'] for r in results)}/{len(results)} |"
        )
    print(f"\n{demo.stamp()}; Python {sys.version.split()[0]}, {time.tzname[0]}")


if __name__ == "__main__":
    main()
