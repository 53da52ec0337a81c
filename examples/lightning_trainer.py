"""Train a head with Lightning's Trainer and your own callback. A real run has thousands of steps."""

from pathlib import Path

from lightning.pytorch import Callback, Trainer

from fsd_train.callbacks import ExportHead
from fsd_train.data import AnswersDataModule
from fsd_train.models import EagleModule


class ShowLoss(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss']:.3f}")


module = EagleModule("smollm2-135m", draft_vocab_size=4096, unroll_steps=2, loss="eagle")
answers = Path(__file__).parent.parent / "data" / "smollm2-135m-answers.jsonl.gz"
data = AnswersDataModule([str(answers)], max_length=128, batch_tokens=512)
trainer = Trainer(max_steps=3, limit_val_batches=1, callbacks=[ShowLoss(), ExportHead("runs/lightning/head")])
trainer.fit(module, datamodule=data)
