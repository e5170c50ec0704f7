"""Small models of a dozen architectures, each with a function that runs its forward pass and returns the loss."""

import torch
from torch import nn
from torch.nn import functional as F


class UNet(nn.Module):
    """What the first half computes comes back in the second half."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 16), (16, 32)))
        self.mid = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, b, 2, 2) for a, b in ((32, 16), (16, 8), (8, 3)))

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = F.relu(layer(x))
            kept.append(x)
        x = self.mid(x)
        for layer in self.up:
            x = F.relu(layer(torch.cat([x, kept.pop()], 1)))
        return x


class LoRA(nn.Module):
    """Frozen blocks with small trained matrices beside them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Adapted() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class _Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def _transformers(name, config, call):
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config[0])(**config[1]))
    model.train()
    return model, lambda: call(model)


def _language(name, config, **more):
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "max_position_embeddings": 32, **more}
    x = torch.arange(8)[None]
    return _transformers(name, (config, small), lambda model: model(input_ids=x, labels=x).loss)


def _gpt2():
    x = torch.arange(8)[None]
    shape = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 32}
    return _transformers("GPT2LMHeadModel", ("GPT2Config", shape), lambda model: model(input_ids=x, labels=x).loss)


def _t5():
    x = torch.arange(8)[None]
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
    shape["decoder_start_token_id"] = 0
    return _transformers("T5ForConditionalGeneration", ("T5Config", shape), lambda m: m(input_ids=x, labels=x).loss)


def _vit():
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    shape |= {"image_size": 16, "patch_size": 8}
    x = torch.ones(1, 3, 16, 16)
    return _transformers(
        "ViTForImageClassification", ("ViTConfig", shape), lambda m: m(pixel_values=x, labels=torch.tensor([1])).loss
    )


def _convnext():
    shape = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 4}
    x = torch.ones(1, 3, 64, 64)
    return _transformers(
        "ConvNextForImageClassification", ("ConvNextConfig", shape), lambda m: m(pixel_values=x).logits.sum()
    )


def _resnet():
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 2, 1, 1], "num_labels": 4}
    x = torch.ones(2, 3, 64, 64)
    return _transformers(
        "ResNetForImageClassification", ("ResNetConfig", shape), lambda m: m(pixel_values=x).logits.sum()
    )


def _plain(model, x):
    return model, lambda: model(x).sum()


ARCHITECTURES = {
    "mlp": lambda: _plain(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), torch.ones(2, 8)),
    "unet": lambda: _plain(UNet(), torch.ones(1, 3, 16, 16)),
    "lora": lambda: _plain(LoRA(), torch.ones(2, 8)),
    "encoder": lambda: _plain(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3), torch.ones(1, 4, 16)
    ),
    "gpt2, tied": _gpt2,
    "llama": lambda: _language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1),
    "mixtral": lambda: _language(
        "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=2
    ),
    "bert": lambda: _language("BertForMaskedLM", "BertConfig"),
    "t5": _t5,
    "vit": _vit,
    "convnext": _convnext,
    "resnet": _resnet,
}
