"""Use legato with the Trainer of Hugging Face transformers, in place of its DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/with_transformers.py

The only overridden method is the one that wraps the model.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import legato


class LegatoTrainer(Trainer):
    """A Trainer that wraps the model and its optimizer with `legato.distribute`."""

    def _wrap_model(self, model, training=True, dataloader=None):
        if not training or model is not self.model:
            return model
        wrapped, self.optimizer = legato.distribute(model, self.optimizer)
        return wrapped


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32))
    tokens = torch.randint(0, 100, (128, 16))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=4,
            max_steps=16,
            learning_rate=1e-3,
            gradient_accumulation_steps=2,
            logging_steps=8,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = LegatoTrainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
        result = trainer.train()
        trainer.save_model(directory)
    if arguments.process_index == 0:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"{result.global_step} steps on {arguments.world_size} ranks, weights add up to {total:.12f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
