"""Every row of the table of conflicts is found in a recipe, at its key and with a fix; what is not there is not found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import SFTConfig

from kinject.augment.styles import read_styles
from kinject.recipe import Recipe, conflicts, read_recipe, train_conflicts
from kinject.recipe.conflicts import CONFLICTS, Asking, Shared, find_problems
from kinject.recipe.train_conflicts import Launch

Write = Callable[[str, str], Path]
SANDBOX = {"kind": "sandbox"}
OPENAI = {"kind": "openai", "model": "m"}
DOCUMENTS = {"documents": "d.jsonl", "styles": {"paraphrase": 1}, "generator": SANDBOX}
ASKED = {"documents": "d.jsonl", "generator": SANDBOX}
EVAL = {"models": {"base": "m"}, "questions": {"new": "q.jsonl"}}
CHAT = {"endpoint": {"base_url": "http://a/v1", "model": "m"}, "api": "chat"}
SERVED = {**CHAT, "api": "completions"}
WRITTEN = {"formats": ["generate"]}
JUDGED = {**WRITTEN, "scores": ["judge"]}
BASES: dict[str, dict[str, Any]] = {
    "augment": {"augment": DOCUMENTS},
    "questions": {"questions": ASKED},
    "eval": {"eval": EVAL},
    "study": {
        "study": {
            "title": "t",
            "train": "t.yaml",
            "eval": "e.yaml",
            "models": {"m": "m"},
            "arms": {"a": {}},
            "augment": "a",
        }
    },
    "train": {
        "model": {"path": "m"},
        "corpus": {"path": "c.jsonl"},
        "trainer": {"packing_strategy": "bfd_split"},
    },
}
"""Verb -> a recipe without a problem, into which the sections of an example are put."""
DEFAULTS = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
HARD = {"hard_example_mining": {"fraction": 0.5}}
WEIGHTS = {"row_weights": {"column": "w"}}
PISSA = {"r": 2, "init_lora_weights": "pissa"}
CARTRIDGE = {"type": "cartridge", "num_virtual_tokens": 4}
KEPT = {"projection": {"path": "kept.jsonl"}}
NEW = {"new": {"model_type": "llama"}, "tokenizer": {"vocab_size": 300}}
PROBES = {"questions": {"new": "q.jsonl"}}
VALIDATED = {"path": "c.jsonl", "validation_corpus": "v.jsonl"}
STEPS = {"eval_strategy": "epoch"}

TRAIN: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"model": {}}, {}, "model", "give either path"),
    ({"model": {"new": {"model_type": "llama"}}}, {}, "model.tokenizer", "missing"),
    ({"model": {"path": "m", "tokenizer": "t"}}, {}, "model.tokenizer", "brings its own"),
    ({"model": {"path": "m", "quantization": "4bit"}}, {}, "model.quantization", "do not train"),
    ({"model": {"path": "m", "freeze": ["*"]}, "adapter": {"r": 2}}, {}, "model.freeze", "freezes the base"),
    ({"model": {"path": "m", "quantization": "4bit"}, "adapter": {"merge": True}}, {}, "adapter.merge", "loses precision"),
    ({}, {"lacks_attention": "flash needs an NVIDIA GPU"}, "model.attention", "flash needs an NVIDIA GPU. Set"),
    ({"model": {"path": "m", "attention": "flex_attention"}}, {}, "model.attention", "does not train on a CPU"),
    ({"trainer": {"bf16": True}}, {"emulates_bf16": "T4 emulates."}, "trainer.bf16", "T4 emulates. Remove"),
    ({"model": {"path": "m", "dtype": "bfloat16"}}, {"emulates_bf16": "T4 emulates."}, "model.dtype", "Set model.dtype: float32"),
    ({"corpus": {"path": "c", "mix": {"replay": {"path": "r", "fraction": 0.1}}}}, {}, "corpus.mix.replay", "Move it up"),
    ({"corpus": {"path": "c", "mix": {"a": {"path": "r", "fraction": 0.6}, "b": {"path": "r", "fraction": 0.5}}}}, {},
     "corpus", "sum to 1.1"),
    ({"corpus": {"path": "c", "mix": {"a": {"path": "r", "fraction": 0.6, "answers": "own"}}}, "model": NEW}, {},
     "corpus.mix.a.answers", "no answers yet"),
    ({"corpus": {"path": "c", "answers": "own"}, "model": NEW}, {}, "corpus.answers", "no answers yet"),
    ({"corpus": {"path": "c", "answers": "own"}, "method": "cpt"}, {}, "corpus.answers", "ask nothing"),
    ({"corpus": {**VALIDATED, "validation_fraction": 0.1}, "trainer": STEPS}, {}, "corpus.validation_fraction", "Keep one"),
    ({"corpus": {"path": "c", "validation_fraction": 0.1}}, {}, "trainer.eval_strategy", "corpus.validation_fraction needs"),
    ({"probes": PROBES}, {}, "trainer.eval_strategy", "missing. probes needs evaluations"),
    ({"techniques": {"patience": 1}}, {}, "trainer.eval_strategy", "techniques.patience needs"),
    ({"trainer": {"lr_scheduler_type": "greedy"}}, {}, "trainer.eval_strategy", "trainer.lr_scheduler_type needs"),
    ({"trainer": {"save_strategy": "best"}}, {}, "trainer.eval_strategy", "trainer.save_strategy needs"),
    ({"trainer": STEPS}, {}, "trainer.eval_strategy", "nothing to evaluate on"),
    ({"trainer": {"eval_on_start": True}}, {}, "trainer.eval_on_start", "nothing to evaluate on"),
    ({"probes": PROBES, "trainer": {**STEPS, "load_best_model_at_end": True}}, {}, "trainer.metric_for_best_model",
     "missing. trainer.load_best_model_at_end follows it. Allowed: new_accuracy, accuracy."),
    ({"probes": PROBES, "trainer": STEPS, "techniques": {"patience": 1}}, {}, "trainer.metric_for_best_model",
     "techniques.patience follows it"),
    ({"corpus": VALIDATED, "trainer": {**STEPS, "save_strategy": "best"}}, {}, "trainer.metric_for_best_model",
     "trainer.save_strategy follows it. Allowed: loss."),
    ({"probes": PROBES, "trainer": {**STEPS, "metric_for_best_model": "new_acuracy"}}, {}, "trainer.metric_for_best_model",
     "found 'new_acuracy'. Did you mean new_accuracy?"),
    ({"probes": {**PROBES, "max_forgetting": 0.1}, "trainer": STEPS}, {}, "probes.max_forgetting", "role: retention"),
    ({"trainer": {"packing": True, "max_length": None}}, {}, "trainer.max_length", "needs a block length"),
    ({"trainer": {"use_liger_kernel": True}}, {"device": "cuda"}, "trainer.use_liger_kernel", "pip install liger-kernel."),
    ({"trainer": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}}, {}, "trainer.optim",
     "pip install 'kinject[schedule-free]'."),
    ({}, {"fp16": True}, "trainer.fp16", "needs a GPU"),
    ({"trainer": {"use_liger_kernel": True}}, {}, "trainer.use_liger_kernel", "Triton's"),
    ({"trainer": {"activation_offloading": True}}, {}, "trainer.activation_offloading", "on the CPU"),
    ({"trainer": {"optim": "paged_lion_32bit"}}, {}, "trainer.optim", "Set lion_32bit."),
    ({"trainer": {"fsdp": "full_shard"}}, {}, "trainer.fsdp", "no launcher started"),
    ({"trainer": {"torch_compile_backend": "inductr"}}, {}, "trainer.torch_compile_backend", "Did you mean inductor?"),
    ({"trainer": {"torch_compile": True}}, {"lacks_compiler": True}, "trainer.torch_compile", "Install g++"),
    ({"trainer": {"push_to_hub": True}}, {"cannot_upload": "none. Unset it"}, "trainer.push_to_hub", "none. Unset it, or remove"),
    ({"techniques": {"histogram_steps": 2}}, {}, "techniques.histogram_steps", "Set trainer.report_to: tensorboard or wandb"),
    ({"techniques": HARD, "trainer": {"loss_type": "dft"}}, {}, "techniques.hard_example_mining", "trainer.loss_type: dft"),
    ({"trainer": {"loss_type": "dft", "label_smoothing_factor": 0.1}}, {}, "trainer.label_smoothing_factor", "the loss nll"),
    ({"method": "distill", "trainer": {"loss_type": "dft"}}, {}, "method", "the loss nll"),
    ({"techniques": {**HARD, **WEIGHTS}}, {}, "techniques.hard_example_mining", "it is undefined which loss"),
    ({"adapter": CARTRIDGE, "model": NEW}, {}, "adapter", "without the new model's own weights"),
    ({"adapter": {"type": "ia3"}, "model": NEW}, {}, "adapter", "set adapter.merge: true"),
    ({"adapter": PISSA, "method": "distill"}, {}, "method", "Set it to true"),
    ({"adapter": PISSA, "regularization": {"kl": 1.0}}, {}, "regularization.kl", "takes a part"),
    ({"adapter": PISSA, "model": {"path": "m", "quantization": "4bit"}}, {}, "adapter.init_lora_weights", "not quantized"),
    ({"adapter": {**PISSA, "init_lora_weights": "mica"}}, {"in_parts": True}, "adapter.init_lora_weights", "decomposes weights"),
    ({"adapter": {**PISSA, "layer_replication": [[0, 2], [1, 2]]}}, {}, "adapter.layer_replication", "copies share weights"),
    ({"adapter": {"r": 2, "bias": "all"}, "regularization": {"kl": 1.0}}, {}, "regularization.kl", "whose biases adapter.bias"),
    ({"adapter": {"type": "oft", "bias": "oft_only"}, "method": "recall", "trainer": {"beta": 0.1}}, {}, "method",
     "whose biases adapter.bias trains"),
    ({"adapter": {"r": 2, "layer_replication": [[0, 2], [1, 2]]}, "method": "distill"}, {}, "method", "makes a deeper model"),
    ({"techniques": WEIGHTS, "regularization": {"kl": 1.0}}, {}, "techniques.row_weights", "regularization.kl is in units"),
    ({"regularization": {"kl": 1.0}}, {}, "regularization.kl", "Set corpus.replay."),
    ({"regularization": {"kl": 1.0}, "trainer": {"packing": True, "packing_strategy": "wrapped"}}, {}, "regularization.kl",
     "needs separated documents"),
    ({"distillation": {}, "method": "cpt"}, {}, "distillation", "belongs to method: distill"),
    ({"distillation": {"context": "none"}, "method": "distill"}, {}, "distillation.context", "would teach itself"),
    ({"method": "distill", "model": NEW}, {}, "method", "nothing to teach"),
    ({"method": "distill"}, {"is_sharded": True}, "method", "whole weights on one process"),
    ({"method": "recall", "model": NEW}, {}, "method", "drawn from a trained model"),
    ({"method": "recall", "trainer": {"packing": True}}, {}, "trainer.packing", "those of method: recall are drawn"),
    ({"trainer": {"num_generations": 4}}, {}, "trainer.num_generations", "is GRPOConfig's"),
    ({"regularization": {"l2": 1.0}, "adapter": {"r": 2}}, {}, "regularization.l2", "an adapter does not change"),
    ({"regularization": KEPT, "model": NEW}, {}, "regularization.projection", "nothing to keep"),
    ({"regularization": KEPT, "adapter": {"use_dora": True}}, {}, "regularization.projection", "Remove adapter.use_dora"),
    ({"regularization": KEPT, "adapter": CARTRIDGE}, {}, "regularization.projection", "a cartridge changes none"),
    ({"adapter": CARTRIDGE}, {"is_sharded": True}, "adapter.type", "whole on each process"),
    ({"adapter": {**CARTRIDGE, "merge": True}}, {}, "adapter.merge", "no part of the weights"),
    ({"techniques": {"freeze_base_steps": 2}, "adapter": {"r": 2}}, {}, "techniques.freeze_base_steps", "frozen to the end"),
    ({"techniques": {"freeze_base_steps": 2}}, {}, "techniques.freeze_base_except", "Name the parameters that train first"),
    ({"techniques": {"freeze_base_except": ["lm_head.*"]}}, {}, "techniques.freeze_base_steps", "freeze_base_except needs it"),
    ({"techniques": {"reinitialize_last_layers": 1}, "adapter": {"r": 2}}, {}, "techniques.reinitialize_last_layers",
     "beside an adapter"),
    ({"techniques": {"reinitialize_last_layers": 1}, "method": "distill"}, {}, "techniques.reinitialize_last_layers",
     "a teacher needs its own"),
    ({"techniques": {"reinitialize_last_layers": 1}, "regularization": {"l2": 0.1}}, {},
     "techniques.reinitialize_last_layers", "to untrained layers"),
    ({"techniques": {"muon": 1.0}}, {"fp16": True}, "techniques.muon", "unscaled gradients"),
    ({"regularization": {"l2": 0.1}}, {"fp16": True}, "regularization.l2", "unscaled gradients"),
    ({"techniques": {"sam": 0.1}, "trainer": {"optim": "lomo"}}, {}, "techniques.sam", "this optimizer updates while"),
    ({"techniques": {"sam": 0.05}, "model": {"path": "m", "dtype": "bfloat16"}}, {}, "techniques.sam", "a step of 0.05 uphill"),
    ({"trainer": {"optim": "schedule_free_adamw"}}, {}, "trainer.lr_scheduler_type", "found linear, but schedule_free"),
    ({"techniques": {"stochastic_rounding": True}, "trainer": {"optim": "schedule_free_adamw"}}, {},
     "techniques.stochastic_rounding", "schedule_free_adamw does not treat weights one by one"),
    ({"techniques": {"stochastic_rounding": True}}, {}, "techniques.stochastic_rounding", "Set model.dtype: bfloat16"),
    ({"techniques": {"muon": 1.0}, "trainer": {"optim": "adamw_8bit"}}, {}, "techniques.muon", "found trainer.optim: adamw_8bit"),
    ({"techniques": {"stochastic_rounding": True, "muon": 1.0}}, {}, "techniques.stochastic_rounding", "Keep one"),
    ({"regularization": KEPT, "trainer": {"optim": "lomo"}}, {}, "regularization.projection", "Set another trainer.optim"),
    ({"regularization": {"l2": 0.1}}, {"splits": "DeepSpeed keeps them."}, "regularization.l2", "and DeepSpeed keeps them."),
    ({"techniques": {"sam": 0.1}}, {"splits": "DeepSpeed keeps them."}, "techniques.sam", "and DeepSpeed keeps them."),
    ({"techniques": {"muon": 1.0}}, {"splits": "DeepSpeed keeps them."}, "techniques.muon", "needs whole weights"),
    ({"regularization": KEPT}, {"in_parts": True}, "regularization.projection", "needs whole weights"),
    ({"techniques": {"reinitialize_last_layers": 1}}, {"is_sharded": True}, "techniques.reinitialize_last_layers", "in parts"),
    ({"regularization": KEPT}, {"splits_matrices": True}, "regularization.projection", "needs whole weights"),
    ({"adapter": {"modules_to_save": ["lm_head"]}}, {"in_parts": True}, "adapter.modules_to_save", "the weights are in parts"),
    ({"trainer": {"optim": "adamw_8bit"}}, {"in_parts": True}, "trainer.optim", "bitsandbytes cannot shard"),
    ({"trainer": {"optim": "lion_8bit"}}, {"is_sharded": True}, "trainer.optim", "bitsandbytes cannot shard"),
    ({"adapter": {"merge": True}}, {"is_sharded": True}, "adapter.merge", "the weights are in parts"),
    ({"trainer": {"packing": True}}, {"splits_rows": True}, "trainer.packing", "context parallelism has no mask"),
    ({"model": {"path": "m", "attention": "eager"}}, {"splits_rows": True}, "model.attention", "sdpa only"),
    ({"method": "distill"}, {"splits_rows": True}, "method", "needs whole rows"),
]  # fmt: skip

FILE = {"kind": "file", "path": "texts.jsonl"}
OTHERS: list[tuple[str, dict[str, Any], str, str]] = [
    ("eval", {"model": {"quantization": "4bit"}}, "model", "as NAME: {path: ..., quantization: 4bit}"),
    ("eval", {"models": {"m": {"path": "m", "device_map": "auto"}}}, "eval.models.m.device_map", "Start one"),
    ("eval", {"models": {"m": {"path": ".", "revision": "main"}}}, "eval.models.m.revision", "path is a folder"),
    ("eval", {"models": {"m": {**CHAT, "endpoint": SANDBOX}}, **WRITTEN}, "eval.models.m.endpoint", "must be of kind: openai"),
    ("eval", {"models": {"m": {**SERVED, "endpoint": {"kind": "vllm", "model": "m"}, "tokenizer": "."}}},
     "eval.models.m.endpoint", "writes answers only"),
    ("eval", {"models": {"m": CHAT}}, "eval.models.m.api", "returns no log-probs"),
    ("eval", {"models": {"m": {**CHAT, "tokenizer": "."}}, **WRITTEN}, "eval.models.m.tokenizer", "is for api: completions"),
    ("eval", {"models": {"m": {**SERVED, "chat": True}}},
     "eval.models.m.tokenizer", "missing. chat and log-probs of choices need it"),
    ("eval", {"models": {"a": CHAT, "b": {**CHAT, "endpoint": {**CHAT["endpoint"], "base_url": "http://b/v1"}}}, **WRITTEN},
     "eval.models.b.revision", "a has the same model"),
    ("eval", {"retrieval": {"documents": ["d.jsonl"], "kind": "oracle", "min_score": 1.0}}, "eval.retrieval.min_score",
     "whatever it scores"),
    ("eval", {"shots": [0, 2]}, "eval.questions.new", "asks for 2 examples"),
    ("eval", {"scores": ["pmi"], "control": False}, "eval.scores", "Set eval.control: true"),
    ("eval", JUDGED, "eval.judge", "need each other"),
    ("eval", {"judge": OPENAI, **WRITTEN}, "eval.judge", "need each other"),
    ("eval", {"judge": OPENAI, "scores": ["judge"]}, "eval.judge", "no format writes any"),
    ("eval", {"judge": SANDBOX, **JUDGED}, "eval.judge.kind", "found sandbox"),
    ("eval", {"judge": OPENAI, **JUDGED, "budget": 1.0}, "eval.budget", "without prices"),
    ("eval", {"budget": 1.0}, "eval.budget", "without prices"),
    ("augment", {"styles": {"paraphras": 1}}, "augment.styles.paraphras", "Did you mean paraphrase?"),
    ("augment", {"styles": {"paraphrase": 10_001}}, "augment.styles.paraphrase", "allowed: 0 to 10,000"),
    ("augment", {"styles": {"permuted": {"tokens": 9}}}, "augment.styles.permuted", "needs a number"),
    ("augment", {"messages": True}, "augment.messages", "Those that do: atomic_facts, dialogue, faq, knowledge"),
    ("augment", {"one_corpus": True}, "augment.one_corpus", "other rows than text"),
    ("augment", {"coverage": 4, "styles": {"raft": 2, "atomic_facts": 1, "tagged": 1}}, "augment.coverage",
     "Those that can: dialogue, encyclopedic, faq, "),
    ("augment", {"coverage": 2, "generator": FILE, "styles": {"faq": 3}}, "augment.coverage", "kind: file has no model"),
    ("augment", {"raft": {}}, "augment.raft", "is for the style raft"),
    ("augment", {"generator": FILE, "styles": {"paraphrase": 1, "faq": 1}}, "augment.styles", "all of one style"),
    ("augment", {"generator": FILE, "styles": {"entigraph": 1}}, "augment.styles.entigraph", "needs a model to ask"),
    ("augment", {"judge": FILE}, "augment.judge.kind", "must answer"),
    ("augment", {"budget": 1.0}, "augment.budget", "augment.generator.price"),
    ("augment", {"generator": {**OPENAI, "price": [1.0, 2.0], "extra_body": {"max_tokens": None}}, "budget": 3.0},
     "augment.generator.extra_body", "no budget holds. Name one (max_tokens: 8192)"),
    ("eval", {"judge": {**OPENAI, "price": [0, 9.0], "extra_body": {"max_completion_tokens": None}}, **JUDGED, "budget": 4.0},
     "eval.judge.extra_body", "sends no limit of an answer"),
    ("augment", {"generator": {**OPENAI, "price": [1.0]}}, "augment.generator.price", "expected two numbers"),
    ("questions", {"generator": FILE}, "questions.generator.kind", "need a model to ask"),
    ("questions", {"retention": True, "closed_book": 0}, "questions.retention", "closed_book: 0 asks none"),
    ("questions", {"retention": True, "generator": {"kind": "sandbox"}}, "questions.retention", "has no knowledge"),
    ("questions", {"budget": 1.0}, "questions.budget", "questions.generator.price"),
    ("questions", {"generator": {}}, "questions.generator", "model is missing. Give the name of a model"),
    ("augment", {"judge": {"kind": "transformers"}}, "augment.judge", "model is missing. Give a model folder"),
    ("augment", {"generator": {**OPENAI, "base_url": []}}, "augment.generator.base_url", "is empty"),
    ("augment", {"generator": {**OPENAI, "base_url": ["http://a", "http://a/"]}}, "augment.generator.base_url", "twice"),
    ("augment", {"generator": {**OPENAI, "base_url": "http://b:99999/v1"}}, "augment.generator.base_url", "found 'http://b:99999/v1'"),
    ("augment", {"generator": {**SANDBOX, "extra_body": {"a": 1}}}, "augment.generator.extra_body", "is not for kind: sandbox"),
    ("eval", {"models": {"m": {**CHAT, "endpoint": {**OPENAI, "extra_body": {"n": 2}}}}, **WRITTEN},
     "eval.models.m.endpoint.extra_body.n", "is not read here. kinject sets it."),
    ("augment", {"generator": {**OPENAI, "extra_body": {"stop": "x"}}}, "augment.generator.extra_body.stop",
     "Use the generator's own key stop."),
    ("augment", {"generator": {**OPENAI, "kind": "transformers", "extra_body": {"a": 1}}}, "augment.generator.extra_body.a",
     "reads numbers: top_k"),
]  # fmt: skip
"""(verb, its section, the key of a problem, a part of its message)."""
CURVE = {"sweeps": {"steps": {"key": "trainer.max_steps", "arm": "a", "values": [1, 2]}}}
CLAIM = {
    "statement": "s",
    "test": "difference",
    "arm": "a",
    "baseline": "base",
    "question_set": "new",
}
GRID = {"key": "trainer.warmup_steps", "values": [3, 9], "arm": "a", "question_sets": "new"}
STUDY: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"arms": {"a": {"match": {"steps": "b"}}, "bb": {}}}, {}, "study.arms.a.match.steps", "found 'b'. Did you mean bb?"),
    ({"claims": {"c": {**CLAIM, "question_set": "nw"}}}, {}, "study.claims.c.question_set", "Did you mean new?"),
    ({"claims": {"c": {**CLAIM, "question_set": ["new", "new"]}}}, {}, "study.claims.c.question_set", "'new' is there twice"),
    ({"claims": {"c": {**CLAIM, "question_set": ["new", "old"]}}}, {"formats": {"old": "cloze", "new": "letters"}},
     "study.claims.c.question_set", "claims on new in letters, old in cloze: the answers of several formats are not one."),
    ({"claims": {"c": {**CLAIM, "arm": {"rates": 1}}}}, {}, "study.claims.c.arm", "found 'rates'. There is none."),
    ({**CURVE, "claims": {"c": {**CLAIM, "arm": {"steps": 3}}}}, {}, "study.claims.c.arm", "found 3, expected one point"),
    ({**CURVE, "claims": {"c": {**CLAIM, "arm": {"steps": 1, "other": 2}}}}, {}, "study.claims.c.arm", "as {SWEEP: VALUE}"),
    ({"arms": {"base": {}}}, {}, "study.arms.base", "the untouched model's"),
    ({"arms": {"a+rag": {}}}, {}, "study.arms.a+rag", "taken for another arm"),
    ({"arms": {"a": {"match": {"steps": "b", "seconds": "b"}}, "b": {}}}, {}, "study.arms.a", "steps and seconds exclude"),
    ({"arms": {"a": {"match": {"steps": "b"}}, "b": {"match": {"steps": "a"}}}}, {}, "study.arms.a", "b is itself matched"),
    ({"arms": {"b": {}, "a": {"after": "b", "through": "m"}}}, {}, "study.arms.a", "two models to begin with"),
    ({"arms": {"a": {"through": "m"}}}, {"adapters": {("study", "arms", "a"): "a"}}, "study.arms.a", "Set adapter.merge: true"),
    ({"augment": None}, {}, "study.arms.a", "corpus augmented needs study.augment"),
    ({"arms": {"a": {"corpus": "no.jsonl"}}}, {}, "study.arms.a.corpus", "found 'no.jsonl': neither augmented nor random"),
    ({"models": {"m": {"path": "m", "overrides": {"seed": 1}}}}, {}, "study.models.m", "Give a recipe"),
    ({"claims": {"c": {**CLAIM, "test": "trend"}}}, {}, "study.claims.c", "sweep: missing; test trend needs it"),
    ({"sweeps": {"steps": {**CURVE["sweeps"]["steps"], "values": [2, 9, 4]}},
      "claims": {"c": {**CLAIM, "test": "trend", "sweep": "steps"}}}, {},
     "study.sweeps.steps.values", "found 2, 9, 4, but claim c tests a trend along them. Sort them."),
    ({"overrides": {"trainr.max_steps": 2}}, {}, "study.overrides.trainr.max_steps", "must begin with one of augment, corpus"),
    ({"overrides": {"corpus.path": "c"}}, {}, "study.overrides.corpus.path", "is set by the study"),
    ({"augment": None, "overrides": {"augment.styles": {}}}, {}, "study.overrides.augment.styles", "which is missing"),
    ({"tune": {"r": {"key": "trainer.max_steps", "values": [1], "arm": "a", "question_sets": "new"}}}, {},
     "study.tune.r.question_sets", "'new' has no validation questions"),
    ({"arms": {"a": {"overrides": {"adapter": {"r": 2}}}}, "tune": {"r": {**GRID, "key": "adapter.r", "arm": "a"}}}, {},
     "study.arms.a.overrides.adapter", "study.tune.r chooses adapter.r for this arm. Remove one of them."),
    ({"arms": {"a": {}, "b": {}}, "tune": {"r": {**GRID, "arms": ["a"]}, "s": {**GRID, "arm": "b"}}}, {},
     "study.tune.s", "r chooses trainer.warmup_steps for a, too. Give each its arms."),
    ({"arms": {"a": {"match": {"tokens": "b"}}, "b": {}}, **CURVE}, {}, "study.sweeps.steps.key",
     "trainer.max_steps has no effect on a, which is matched"),
    ({"seeds": [4, 2, 4]}, {}, "study.seeds", "found 4, 2, 4: a seed is there twice."),
    ({"sweeps": {"steps": {**CURVE["sweeps"]["steps"], "seeds": [7, 7]}}}, {}, "study.sweeps.steps.seeds", "found 7, 7"),
    ({"claims": {"c": {**CLAIM, "arm": "a+rga"}}}, {}, "study.claims.c.arm", "found 'rga'. Did you mean rag?"),
    ({"retrievals": {"rag": {"kind": "oracle"}}}, {}, "study.retrievals.rag", "taken for another arm"),
    ({"retrievals": {"more": {"k": [5]}}}, {}, "study.retrievals.more.k", "the numbers of passages of its eval recipe"),
    ({"price": [1.0, 2.0]}, {}, "study.price", "expected three numbers"),
    ({"claims": {"c": {**CLAIM, "test": "near_chance"}}}, {"writes": {"new"}, "writes_words": {"new"}}, "study.claims.c.test",
     "near_chance: the answers are written"),
    ({"claims": {"c": {**CLAIM, "test": "near_chance", "net": True}}}, {}, "study.claims.c.net", "has no effect on near_chance"),
    ({"claims": {"c": {**CLAIM, "outcome": "abstained"}}}, {}, "study.claims.c.outcome", "found abstained, but the answers are"),
]  # fmt: skip


def _study(
    write: Write, section: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[Recipe, Shared]:
    recipe = _recipe(write, "study", {"study": {**BASES["study"]["study"], **section}})
    return recipe, Shared(
        augment_keys=("augment",),
        train_keys=("trainer", "corpus"),
        sets={"new": "q.jsonl"},
        **facts,
    )


@pytest.mark.parametrize(("section", "facts", "key", "message"), STUDY)
def test_names_and_overrides_of_a_study_are_checked_by_rows(
    write: Write, section: dict[str, Any], facts: dict[str, Any], key: str, message: str
) -> None:
    recipe, shared = _study(write, section, facts)
    problems = find_problems("study", recipe, shared)
    assert any(item.dotted == key and message in item.message for item in problems), problems


def _others(write: Write, verb: str, section: Mapping[str, Any]) -> tuple[Recipe, Any]:
    """Return a recipe of a verb that does not train, and what its rows read beside it."""
    sections = (
        section
        if verb == "eval" and "model" in section
        else {verb: {**BASES[verb][verb], **section}}
    )
    recipe = _recipe(write, verb, sections)
    formats = recipe.eval.formats if recipe.eval is not None else ()
    facts = {
        "eval": Asking(writes="generate" in formats, scores="texts" in formats, is_shared=True),
        "augment": read_styles(()), "questions": None,
    }  # fmt: skip
    return recipe, facts[verb]


@pytest.mark.parametrize("styles", [{}, {"questions": 1, "table": 2}])
def test_coverage_is_for_one_style_of_texts_and_nothing_without_styles(
    write: Write, styles: dict[str, int]
) -> None:
    section = {"coverage": 3, "styles": styles}
    assert find_problems("augment", *_others(write, "augment", section)) == []


def test_a_budget_is_for_a_judge_with_a_price_beside_a_writer_without(write: Write) -> None:
    section = {"judge": {**OPENAI, "price": [0.4, 1.6]}, "budget": 2.5}
    assert find_problems("augment", *_others(write, "augment", section)) == []


@pytest.mark.parametrize(("verb", "section", "key", "message"), OTHERS)
def test_sections_that_do_not_train_have_rows_of_their_own(
    write: Write, verb: str, section: dict[str, Any], key: str, message: str
) -> None:
    problems = find_problems(verb, *_others(write, verb, section))
    assert any(item.key == key and message in item.message for item in problems), problems


def _recipe(write: Write, verb: str, sections: Mapping[str, Any]) -> Recipe:
    base = BASES[verb]
    merged = {"run_dir": "run", **base, **sections}
    if verb == "train":
        merged["trainer"] = {**base["trainer"], **sections.get("trainer", {})}
    return read_recipe(
        write("r.yaml", yaml.safe_dump(merged, sort_keys=False)), (), verb, check_inputs=False
    )  # type: ignore[arg-type]


def _facts(recipe: Recipe, facts: Mapping[str, Any]) -> Launch:
    return Launch(trainer={**DEFAULTS, **recipe.trainer}, **facts)


@pytest.mark.parametrize(("sections", "facts", "key", "message"), TRAIN)
def test_what_excludes_or_needs_another_key_is_a_problem_at_its_key(
    write: Write, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], facts: dict[str, Any], key: str, message: str
) -> None:  # fmt: skip
    monkeypatch.setattr(train_conflicts, "find_spec", lambda name: None)
    recipe = _recipe(write, "train", sections)
    problems = find_problems("train", recipe, _facts(recipe, facts))
    assert any(item.key == key and message in item.message for item in problems), problems
    assert all(
        "{" not in item.message and item.message.endswith((".", "?")) for item in problems
    ), problems


def test_no_row_lacks_an_example(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_conflicts, "find_spec", lambda name: None)
    found = set()
    for sections, facts, *_ in TRAIN:
        recipe = _recipe(write, "train", sections)
        found |= {
            row for row in CONFLICTS["train"] if any(row.problems(recipe, _facts(recipe, facts)))
        }
    assert {*CONFLICTS["plan"]} <= found
    for verb, section, *_ in OTHERS:
        recipe, facts = _others(write, verb, section)
        found |= {row for row in CONFLICTS[verb] if any(row.problems(recipe, facts))}
        generators = [generator for _, generator in conflicts._generators(recipe, verb)]
        found |= {
            row for row in CONFLICTS["generator"] for one in generators if any(row.problems(one))
        }
    for section, facts, *_ in STUDY:
        recipe, shared = _study(write, section, facts)
        found |= {row for row in CONFLICTS["study"] if any(row.problems(recipe, shared))}
    assert [row.message for rows in CONFLICTS.values() for row in rows if row not in found] == []


@pytest.mark.parametrize("verb", BASES)
def test_a_recipe_without_conflicts_has_no_problem(write: Write, verb: str) -> None:
    if verb == "train":
        recipe = _recipe(write, verb, {})
        assert find_problems(verb, recipe, _facts(recipe, {})) == []
    elif verb == "study":
        assert find_problems(verb, *_study(write, {}, {})) == []
    else:
        assert find_problems(verb, *_others(write, verb, {})) == []
