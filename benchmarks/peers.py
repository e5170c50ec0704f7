"""The measured steps of whole jobs, compared with predictions of other tools.

    git clone https://github.com/calculon-ai/calculon && git -C calculon checkout caa4b11
    git clone https://github.com/MooreThreads/SimuMax && git -C SimuMax checkout 4dcaae5
    pip install pandas sympy tqdm psutil matplotlib graphviz    # what they import
    python benchmarks/peers.py --calculon calculon --simumax SimuMax [--open FILE]

    git clone --recursive https://github.com/astra-sim/astra-sim && cd astra-sim && git checkout ec7ea2e
    git submodule update --recursive && bash build/astra_analytical/build.sh && cd ..
    python benchmarks/peers.py --astra astra-sim

Calculon predicts GPTs, and gets the rows of arXiv 2104.04473 and 2205.05198, with its own description of an A100
(`systems/a100_80g.json`) and the settings of its own validation. SimuMax gets its own rows, on its own machine with
efficiencies measured for each shape. legato has fitted five constants to nine rows (`fit`); medians omit these rows.

ASTRA-sim gets single collectives on one switch, on each of its two analytical networks. In one network, messages never
share a link; in the other network, messages wait for links, and the switch stores each message as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from whole_jobs import Row, fitted, middling, published, rows

from legato.core.job import Job
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import Network, fabric, plain_plan, simulate_flow
from legato.whole_jobs.step import predict

#: Of SimuMax's files: the strategy of a layout (tensor, pipeline), and the model of a family and number of layers.
STRATEGIES = {(1, 2): "tp1_pp2_dp4_mbs1", (2, 1): "tp2_pp1_dp4_mbs1", (4, 1): "tp4_pp1_dp2_mbs1"}
EXPERT_STRATEGIES = {(1, 1): "ep8_pp1_dp8_mbs1", (1, 2): "ep4_pp2_dp4_mbs1"}
MODELS = {"70b": "llama3-70b", "405b": "llama3-405b_padding_128", "v2": "deepseekv2"}


def calculon_s(folder: Path, job: Job) -> float:
    """Seconds of a step by Calculon. Its own errors end the comparison."""
    from calculon.llm import Llm
    from calculon.system import System

    model, mesh, eight_bits = job.model, job.mesh, job.machine.name == "h100-fp8"
    application = {
        "hidden": model.hidden,
        "feedforward": model.intermediate,
        "seq_size": model.sequence,
        "attn_heads": model.heads,
        "attn_size": model.head_size,
        "num_blocks": model.layers,
    }
    execution = {
        "num_procs": mesh.workers,
        "tensor_par": mesh.tensor,
        "pipeline_par": mesh.pipeline,
        "data_par": mesh.data,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": job.microbatches * job.microbatch * mesh.data,
        "microbatch_size": job.microbatch,
        "datatype": "float8" if eight_bits else "float16",
        "fused_activation": eight_bits,
        "attention_type": "multihead",
        # Flash attention recomputes its scores.
        "activation_recompute": {"full": "full", "core": "attn_only", "none": "attn_only"}[job.recompute],
        "pipeline_interleaving": job.chunks,
        "optimizer_sharding": job.shard == "optimizer" and mesh.data > 1,
        "tensor_par_comm_type": "rs_ag" if job.sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if "tensor:forward" in job.framework.hidden and job.sequence_parallel else "none",
        "seq_par_ag_redo": job.sequence_parallel,
        "data_par_overlap": "data" in job.framework.hidden and mesh.data > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    name = "h100_80g_nvl8" if eight_bits else "a100_80g"
    system = System(json.loads((folder / f"systems/{name}.json").read_text()))
    prediction = Llm(Llm.Application(application), logging.getLogger("calculon"))
    prediction.compile(system, Llm.Execution.from_json(execution))
    prediction.run(system)
    return float(prediction.get_stats_json(False)["total_time"])


def simumax_s(folder: Path, job: Job) -> float:
    """Seconds of a step by SimuMax, with the settings that its own rows were measured with."""
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    mesh, experts = job.mesh, job.model.experts > 1
    strategy = (EXPERT_STRATEGIES if experts else STRATEGIES)[mesh.tensor, mesh.pipeline]
    files: dict[str, Any] = {
        "strategy_config": StrategyConfig.init_from_config_file(str(folder / f"configs/strategy/{strategy}.json")),
        "model_config": ModelConfig.init_from_config_file(
            str(folder / f"configs/models/{MODELS[job.name.split()[0]]}.json")
        ),
        "system_config": SystemConfig.init_from_config_file(str(folder / "configs/system/b200_bf16_ceperm.json")),
    }
    files["strategy_config"].micro_batch_num = job.microbatches
    files["strategy_config"].enable_recompute = False
    files["strategy_config"].cross_entropy_loss_fusion = True
    files["model_config"].layer_num = job.model.layers
    files["model_config"].padded_vocab_size = True
    files["model_config"].make_vocab_size_divisible_by = 128
    if experts:
        files["model_config"].moe_pad_expert_input_to_capacity = True
        files["model_config"].capacity = 1
    model = PerfLLM()
    model.configure(**files)
    model.run_estimate()
    number, unit = model.analysis_cost().data["duration_time_per_iter"].split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


#: A fabric of legato, and ASTRA-sim's collective and algorithm; a shuffle is two all-to-alls.
COLLECTIVES = {
    "ring": ("ALL_REDUCE", "ring", 1),
    "halving-doubling": ("ALL_REDUCE", "halvingDoubling", 1),
    "shuffle": ("ALL_TO_ALL", "direct", 2),
}
#: Bytes; ASTRA-sim's GB/s, which are GiB/s, of each link; and the seconds of one, of two on the way.
NBYTES, LINK_GIB_PER_S, LINK_S = 2**26, 1.25, 30e-6


def astra_s(folder: Path, network: str, collective: str, algorithm: str, workers: int) -> float:
    """Seconds of a collective by ASTRA-sim, as a Chakra trace of one node for each worker."""
    sys.path.insert(0, str(folder / "extern/graph_frontend/chakra/schema/protobuf"))
    import et_def_pb2 as chakra

    implementations = {
        f"{name}-implementation": [algorithm] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    }
    system = {
        "scheduling-policy": "LIFO", "endpoint-delay": 1, "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1, "collective-optimization": "localBWAware", "local-mem-bw": 1600, "boost-mode": 0,
    }  # fmt: skip
    switch = {"topology": "Switch", "npus_count": workers, "bandwidth": LINK_GIB_PER_S, "latency": 1e9 * LINK_S}
    with tempfile.TemporaryDirectory() as name:
        case = Path(name)
        node = chakra.Node(id=1, name=collective, type=chakra.COMM_COLL_NODE)
        node.attr.add(name="is_cpu_op", bool_val=False)
        node.attr.add(name="comm_type", int64_val=getattr(chakra, collective))
        node.attr.add(name="comm_size", int64_val=NBYTES)
        for worker in range(workers):
            with open(case / f"trace.{worker}.et", "wb") as file:
                for message in (chakra.GlobalMetadata(version="0.0.4"), node):
                    data = message.SerializeToString()
                    assert len(data) < 128  # a varint of one byte
                    file.write(bytes([len(data)]) + data)
        (case / "system.json").write_text(json.dumps(system | implementations))
        (case / "network.yml").write_text("".join(f"{key}: [ {value} ]\n" for key, value in switch.items()))
        (case / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
        command = [
            folder / f"build/astra_analytical/build/bin/AstraSim_Analytical_{network}",
            f"--workload-configuration={case / 'trace'}",
            f"--system-configuration={case / 'system.json'}",
            f"--remote-memory-configuration={case / 'memory.json'}",
            f"--network-configuration={case / 'network.yml'}",
        ]
        said = subprocess.run(command, cwd=name, capture_output=True, text=True, check=True, timeout=300).stdout
    return max(int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", said)) * 1e-9


def show_astra(folder: Path) -> None:
    job = Workload("one", (Op("f", "forward", 0.0), Op("b", "backward", 0.0)), (Tensor("t", NBYTES, 1, (0,)),))
    for workers in (4, 8, 16, 64):
        links = Network(workers=workers, bandwidth_bps=LINK_GIB_PER_S * 2**33, latency_s=2 * LINK_S, send_s=0.0)
        for name, (collective, algorithm, times) in COLLECTIVES.items():
            ours = simulate_flow(job, plain_plan(job, name), fabric(name), links).iteration_s / times
            theirs = [
                f"{network.lower().replace('_', ' ')} {1e3 * seconds:.3f} ms ({seconds / ours - 1:+.2%})"
                for network in ("Congestion_Unaware", "Congestion_Aware")
                for seconds in (astra_s(folder, network, collective, algorithm, workers),)
            ]
            print(
                f"{collective.lower()} {algorithm:<15} {workers:>2} workers  legato {1e3 * ours:.3f} ms  "
                + "  ".join(theirs)
            )


def show(name: str, found: list[tuple[Row, float]]) -> None:
    """Each row's errors, and the median and worst of those that legato did not fit."""
    for row, theirs_s in found:
        theirs, ours = (seconds / row.measured_s - 1 for seconds in (theirs_s, predict(row.job).seconds))
        print(
            f"{row.family:<18} {row.label:<40} measured {row.measured_s:8.3f} s  {name} {theirs:+7.1%}  "
            f"legato {ours:+7.1%}{'  fit' if row.fit else ''}"
        )
    for family in dict.fromkeys(row.family for row, _ in found):
        chosen = [(row, seconds) for row, seconds in found if row.family == family and not row.fit]
        errors = {name: [abs(seconds / row.measured_s - 1) for row, seconds in chosen]}
        errors["legato"] = [abs(row.error()) for row, _ in chosen]
        text = "; ".join(f"{who} {statistics.median(own):.1%}, {max(own):.1%}" for who, own in errors.items())
        print(f"{family}: {len(chosen)} rows that legato did not fit, median and worst error: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calculon", type=Path, metavar="FOLDER")
    parser.add_argument("--simumax", type=Path, metavar="FOLDER")
    parser.add_argument("--open", type=Path, metavar="FILE", help="also ask Calculon for the GPT-3 steps in this file")
    parser.add_argument("--astra", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.astra is not None:
        show_astra(options.astra.resolve())
    found, _ = fitted(rows())
    if options.open is not None:
        found += [row for row in middling(published(options.open)) if row.label.startswith("gpt3")]
    for name, folder, ask, families in (
        ("Calculon", options.calculon, calculon_s, ("2104.04473", "2205.05198", "NeMo fp8")),
        ("SimuMax", options.simumax, simumax_s, ("B200, dense", "B200, DeepSeek-V2")),
    ):
        if folder is None:
            continue
        sys.path.insert(0, str(folder.resolve()))
        with contextlib.redirect_stdout(io.StringIO()):
            theirs = [(row, ask(folder, row.job)) for row in found if row.family in families]
        show(name, theirs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
