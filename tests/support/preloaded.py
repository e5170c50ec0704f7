"""What a rank needs: imported once, in the server that ranks are forks of."""

import torch._dynamo  # optimizers import it at their first step
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
import torch.distributed

import legato.auto
import legato.lab.servers  # noqa: F401

assert not torch.cuda.is_initialized()
