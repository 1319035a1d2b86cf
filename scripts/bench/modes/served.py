"""One engine that runs workloads for another process: what modes/turns.py starts, once per engine.

It runs with the modules of the tree of this repository that PYTHONPATH names, which may be an older
commit than this file, and writes one line of JSON to standard output when the engine is ready, and
one for each workload whose name it reads.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def first_layers(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the changes of a config.json that leave its first layers."""
    inner = shape.get("text_config", shape)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    for name in ("layer_types", "hybrid_override_pattern"):
        if name in inner:
            changes[name] = inner[name][:layers]
    return changes if inner is shape else {"text_config": inner | changes}


def serve(spec: dict[str, Any]) -> None:
    """Make the engine of `turns.Spec` and run the workloads that standard input names. Tokens go to
    random experts."""
    lines, sys.stdout = sys.stdout, sys.stderr
    from measuring import DEVICE, Rates
    from modes import engine_runs
    from modes.routing import expert_layers, set_routing
    from shapes import MODELS

    if spec["config"].get("deterministic") and DEVICE.type == "cuda":
        from batchgen.kernels.library import keep_one_order

        keep_one_order()
    name, workloads = spec["model"], spec["workloads"]
    if spec["layers"]:
        MODELS[name] = MODELS[name] | first_layers(MODELS[name], spec["layers"])
    config: Any = vars(engine_runs)["EngineConfig"]  # the older tree has it in another module
    bench = engine_runs.Bench(name, config(**spec["config"]), **spec["bench"])
    if expert_layers(bench.weights):  # now that the engine has checked the routers' products
        set_routing(bench.weights, "uniform")
    here = Rates(*spec["rates"]) if spec["rates"] else None
    if spec["rehearse"]:
        bench.engine.capture_graphs()
        for workload in workloads:
            bench.run(workload, spec["temperature"], here)
    else:
        bench.warm_up(workloads, spec["temperature"])
    print(json.dumps({"memory": str(bench.engine.memory)}), file=lines, flush=True)
    for line in sys.stdin:
        run = bench.run(line.strip(), spec["temperature"], here)
        print(json.dumps(_figures(run)), file=lines, flush=True)


def _figures(run: Any) -> dict[str, float | None]:
    """Return the seconds of a run, those of its floor on this GPU, and of a step of most rows."""
    full = run.full_batch
    return {
        "seconds": run.seconds,
        "floor": run.floor_here and run.floor_here.total,
        "idle": run.idle,
        "step_ms": 1e3 * full.seconds / max(full.steps, 1),
        "step_rows": full.rows // max(full.steps, 1),
    }


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
