"""Small whole jobs for tests."""

from msgspec.structs import replace

from legato.core.job import Framework, Job, LanguageModel, Latent, Machine, Mesh

GPT = LanguageModel(4, 64, 8, 8, 8, 256, 1024, 128, family="gpt", tied=True)
LLAMA = LanguageModel(6, 64, 8, 4, 8, 192, 1000, 128)
MIXTURE = LanguageModel(
    6, 64, 8, 8, 8, 192, 1024, 128, experts=8, active_experts=2, expert_intermediate=32, shared_intermediate=64,
    dense_layers=1, latent=Latent(48, 32, 4),
)  # fmt: skip
#: Round numbers, no latencies, and everything at its peak.
IDEAL = Machine(
    "ideal", 1e12, 1e12, 10**10, 1e11, 1e10, 1.0, 1.0, 8, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0
)  # fmt: skip


def job(model=LLAMA, mesh=None, framework=None, machine=IDEAL, **more):
    """A job of one GPU, unless a mesh says otherwise."""
    return Job("test", model, mesh or Mesh(), framework or Framework(), machine, **more)


__all__ = ["GPT", "IDEAL", "LLAMA", "MIXTURE", "job", "replace"]
