"""A loop in the shape of BERT finetuning: an optimizer and scheduler of one's own, the returned loader, dicts as batches."""

# ruff: noqa: T201

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import zstore as deepspeed

PAD, QUESTION, VOCABULARY = 0, 1, 32


class Spans(Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.samples = []
        for _ in range(count):
            length = int(torch.randint(6, 13, (1,), generator=generator))
            tokens = 2 + torch.randperm(VOCABULARY - 2, generator=generator)[:length]
            answer = int(torch.randint(length, (1,), generator=generator))
            question = torch.tensor([QUESTION, int(tokens[answer])])
            self.samples.append({"input_ids": torch.cat((question, tokens)), "position": answer + 2})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": ids != PAD, "positions": torch.tensor([s["position"] for s in samples])}


class SpanModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.places = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.answer = nn.Linear(width, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        scores = self.answer(x).squeeze(-1).masked_fill(~attention_mask, float("-inf"))
        return F.cross_entropy(scores, positions), scores


def grouped_parameters(model: nn.Module) -> list[dict[str, Any]]:
    plain = ("bias", "norm1.weight", "norm2.weight")
    return [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(plain)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(plain)], "weight_decay": 0.0},
    ]


def get_config(args: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": args.stage}
    if args.nvme_path:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": args.nvme_path, "pin_memory": True}
    return {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--nvme_path")
    parser.add_argument("--save_dir")
    parser.add_argument("--save_after", type=int, default=12)
    parser.add_argument("--load_dir")
    parser.add_argument(
        "--leftovers", action="store_true", help="keep the calls of the loop that this one was made from"
    )
    args = parser.parse_args()

    torch.manual_seed(5)
    model = SpanModel()
    optimizer: Any = AdamW(grouped_parameters(model), lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    loader: Any
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=get_config(args),
        lr_scheduler=scheduler,
        training_data=Spans(128),
        collate_fn=collate,
        dist_init_required=True,
    )
    print(
        f"rank {engine.global_rank} has {len(loader)} batches of {engine.train_micro_batch_size_per_gpu()}", flush=True
    )

    if args.load_dir:
        engine.load_checkpoint(args.load_dir)

    engine.train()
    while engine.micro_steps < args.epochs * len(loader):
        for batch in loader:  # after a load, the rest of the epoch
            inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            loss, _ = engine(**inputs)
            engine.backward(loss)
            engine.step()
            if args.leftovers:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done, lr = engine.micro_steps - 1, scheduler.get_last_lr()[0]
            print(
                f"rank {engine.global_rank} step {done} loss {loss.item()!r} lr {lr!r} after {engine.global_steps}",
                flush=True,
            )
            if args.save_dir and engine.micro_steps == args.save_after:
                engine.save_checkpoint(args.save_dir)


if __name__ == "__main__":
    main()
