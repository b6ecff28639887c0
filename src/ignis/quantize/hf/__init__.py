"""Hugging Face checkpoints: a directory of safetensors, JSON and a tokenizer, as a source.

    config.json       -> hyperparameters    architectures, config, hyperparameters, rope
    *.safetensors     -> tensors            checkpoint, tensors
    tokenizer.json or
    tokenizer.model   -> vocabulary         vocabulary, bytelevel, pieces, special

A directory is believed as little as a GGUF file: what changes a model's meaning is followed or
refused, by name.
"""
