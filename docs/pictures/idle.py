"""Draw `idle.svg`: one simulated iteration of ResNet-50 under DDP's buckets and under legato's plan.

    python docs/pictures/idle.py

Four workers at 1 Gbit/s (94.6% of it, as measured), communication as long as computation: the setting of
`python benchmarks/rehearsal.py --ratios 1`, whose measured times are written beside the lanes.
"""

from pathlib import Path

import msgspec

from legato import Cluster
from legato.schedule import schedule
from legato.simulator.collective import simulate
from legato.zoo import workload

MEASURED = {"ddp": ("DistributedDataParallel", "1.77 s"), "legato": ("legato", "1.31 s")}
COLORS = {"backward": "#b4561a", "forward": "#2b6cb0", "message": "#2f855a"}
LEFT, SCALE, HEIGHT = 76, 362, 26


def rectangles(spans, kind):
    """The busy stretches of one kind: spans that touch are one, but each message is drawn alone."""
    merged = []
    for span in sorted((s for s in spans if s.kind == kind), key=lambda s: s.start_s):
        if kind != "message" and merged and span.start_s - merged[-1][1] < 1e-6:
            merged[-1][1] = span.end_s
        else:
            merged.append([span.start_s, span.end_s])
    return merged


def main():
    job = workload("resnet-v1-50")
    cluster = Cluster.derive(workers=4, bandwidth_bps=0.946e9, latency_s=100e-6, collectives=["ring"])
    slower = cluster.collectives["ring"].cost(job.nbytes) / job.compute_s
    job = msgspec.structs.replace(
        job, ops=tuple(msgspec.structs.replace(op, duration_s=op.duration_s * slower) for op in job.ops)
    )
    shapes = []

    def text(x, y, content, anchor="start", weight="400", fill="#7d8590"):
        shapes.append(
            f'<text x="{x:.1f}" y="{y}" fill="{fill}" text-anchor="{anchor}" font-size="13" '
            f'font-weight="{weight}">{content}</text>'
        )

    for row, (name, (label, measured)) in enumerate(MEASURED.items()):
        top = 30 + 112 * row
        timeline = simulate(job, schedule(name, job, cluster), cluster)
        text(LEFT, top - 9, label, weight="600")
        text(LEFT - 10, top + 17, "compute", "end")
        text(LEFT - 10, top + 51, "network", "end")
        for kind, color in COLORS.items():
            y = top + (34 if kind == "message" else 0)
            for start_s, end_s in rectangles(timeline.spans, kind):
                x, width = LEFT + SCALE * start_s, SCALE * (end_s - start_s)
                shapes.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{HEIGHT}" '
                    f'rx="2" fill="{color}"/>'
                )
                if kind != "message" and width > 60:
                    text(x + width / 2, y + 17, kind, "middle", fill="#fff")
                if kind == "forward" and name == "ddp":
                    waited = max(end for _, end in rectangles(timeline.spans, "backward"))
                    text(LEFT + SCALE * (waited + start_s) / 2, y + 17, "idle", "middle", "600")
        end = LEFT + SCALE * timeline.iteration_s
        shapes.append(f'<path d="M{end:.1f} {top - 8}V{top + 68}" stroke="#7d8590" stroke-dasharray="4 3"/>')
        text(end + 6, top + 34, measured, weight="600")
    Path(__file__).with_name("idle.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 222" width="780" height="222" role="img" '
        'font-family="system-ui, sans-serif">\n<title>One iteration under DistributedDataParallel '
        "and under legato</title>\n"
        "<desc>Under DistributedDataParallel the worker computes its backward pass, is idle while "
        "the network sends the "
        "remaining gradients, and then computes the forward pass. Under legato the forward pass "
        "begins while gradients are "
        "still being sent, and the network is busy nearly all the time.</desc>\n" + "\n".join(shapes) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
