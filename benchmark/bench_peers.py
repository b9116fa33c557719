"""How does our server compare with llama.cpp, vLLM, OpenVINO and transformers on this machine?

Usage: python benchmark/bench_peers.py [--quick] [--llama-server PROGRAM] [--gguf bf16=FILE] [--json FILE]

Starts our server in each form of its weights and every peer that is found, lets them take turns in each
row, and prints medians with ranges, the ratios to the best peer, and what the machine could do at best. A
peer that is not found is named with how to install it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import (
    llama_cpp_python,
    llama_server,
    machine,
    openvino_local,
    our_server,
    transformers_local,
    turns,
    vllm_server,
    workloads,
)
from peers.options import parse
from peers.served_model import ServedModel, context_of, open_model
from peers.side import Found, Label
from peers.table import cells, figures, ratio_lines, ratios, row_names, spread
from peers.turns import Results

Limits = list[dict[str, float | str]]


def find_sides(options: argparse.Namespace, logs: Path, model: ServedModel) -> Found:
    """Ours first, then every peer found; of all of them those that `--only` names."""
    found = [
        our_server.find(options, logs, model.weight_bytes),
        llama_server.find(options, logs, model.file),
        llama_cpp_python.find(options, logs, model.file),
        vllm_server.find(options, logs, model.weight_bytes["bf16"]),
        openvino_local.find(options, logs),
        transformers_local.find(options, logs, model.weight_bytes),
    ]
    sides = [side for part in found for side in part.sides if wanted(side.label.name, options.only)]
    names = [side.label.name for side in sides]
    if len(set(names)) != len(names):
        raise ValueError(f"two sides have one name: {names}; give the files names, as --gguf 4-bit:Q4_0=FILE")
    return Found(sides, [line for part in found for line in part.missing])


def wanted(name: str, beginnings: Sequence[str]) -> bool:
    return not beginnings or any(name.lower().startswith(beginning.lower()) for beginning in beginnings)


def chosen_rows(options: argparse.Namespace) -> list[workloads.Row]:
    # A row that is asked for by name is measured in a quick run too.
    rows = workloads.rows(quick=options.quick)
    if options.rows:
        known = {row.names: row for row in [*workloads.rows(quick=False), *rows]}
        rows = [row for row in known.values() if any(wanted(name, options.rows) for name in row.names)]
    if not rows:
        raise ValueError(
            f"--rows {' '.join(options.rows)} names no row; the names begin with decode, prefill, ..."
        )
    return rows


def speaker(begin: float) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:4.0f} s] {line}", file=sys.stderr, flush=True)

    return say


def machine_lines(limits: Limits) -> list[str]:
    lines = [f"{machine.processor()}; level of our kernels: {limits[0].get('level', '-')}"]
    for name in limits[0]:
        values = [float(each[name]) for each in limits if name in each and name != "level"]
        if values:
            lines.append(f"{name}: {spread(values)}")
    return lines


def share_lines(results: Results, labels: dict[str, Label], model: ServedModel, limits: Limits) -> list[str]:
    """What a decode step reads, times the steps a second, over what a plain read reaches."""
    best = max(statistics.median(float(each[name]) for each in limits) for name in limits[-1])
    lines = ["| row | side | GB/s read | share of a plain read |", "|---|---|---|---|"]
    for row in row_names(results):
        context = context_of(row)
        if context is None:
            continue
        for name, found in cells(results, row).items():
            label = labels[name]
            if found.fault or not label.weight_bytes:
                continue
            size = model.step_bytes(label.form, label.weight_bytes, context + workloads.DECODE_TOKENS // 2)
            rate = size * found.median / 1e9
            lines.append(f"| {row} | {name} | {rate:.1f} | {rate / best:.2f} |")
    return lines


def as_json(
    results: Results, labels: dict[str, Label], units: dict[str, str], limits: Limits
) -> dict[str, Any]:
    return {
        "processor": machine.processor(),
        "limits": limits,
        "units": units,
        "labels": {name: dataclasses.asdict(labels[name]) for name in results},
        "sides": {name: dataclasses.asdict(found) for name, found in results.items()},
    }


def end_in_order(number: int, frame: object) -> None:
    """A request to end becomes an exception, so that every side is stopped on the way out."""
    raise SystemExit(128 + number)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, end_in_order)
    begin = time.perf_counter()
    say = speaker(begin)
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model, rows = open_model(options.model_path), chosen_rows(options)
        found = find_sides(options, logs, model)
        for line in found.missing:
            print(line, flush=True)
        sides = [side for side in found.sides if any(row.admits(side.label) for row in rows)]
        if not sides:
            raise ValueError(f"--only {' '.join(options.only)} names no side that was found and has a row")
        limits: Limits = [machine.measure(options.threads, products=True)]
        results = turns.measure(
            sides,
            rows,
            model.prompts,
            repeat=options.repeat,
            seed=options.seed,
            say=say,
            between=lambda: limits.append(machine.measure(options.threads, products=False)),
        )
    labels = {side.label.name: side.label for side in sides}
    units = {name: row.unit for row in rows for name in row.names}
    if options.json:
        options.json.write_text(json.dumps(as_json(results, labels, units, limits), indent=1) + "\n")
    print_report(options, results, labels, units, model, limits)
    say("done")


def print_report(
    options: argparse.Namespace,
    results: Results,
    labels: dict[str, Label],
    units: dict[str, str],
    model: ServedModel,
    limits: Limits,
) -> None:
    print(f"\n{model.file.name}, {options.threads} thread(s), medians of {options.repeat} [lowest..highest];")
    print("served and shared rows: output tok/s, then medians of time to first and time per token in ms\n")
    sections: list[list[str]] = [
        machine_lines(limits),
        figures(results, units),
        ratio_lines(ratios(results, labels)),
        share_lines(results, labels, model, limits),
    ]
    for lines in sections:
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
