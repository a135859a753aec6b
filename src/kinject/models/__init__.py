"""Models and tokenizers: loaded from a folder or the hub, or created; the choice of dtype,
attention and device.

Importing this package imports no torch; its functions do.
"""

from kinject.models.attention import (
    CARTRIDGE,
    causal_fault,
    check_causal,
    check_first_position,
    is_runnable,
    longrope_window,
    new_cartridge,
    padding_positions,
    steady_logits,
    steady_output,
    text_start,
    try_attention,
    try_faster,
    window_of,
    without_flash,
)
from kinject.models.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    base_of_adapter,
    check_files,
    check_finite_in,
    check_trained_base,
    copy_model_file,
    first_line,
    hash_with_base,
    model_files,
    model_hash,
    not_finite,
    not_finite_in,
    read_headers,
    read_object,
    revision_of_base,
    saved_tensors,
    weight_files,
)
from kinject.models.hardware import (
    FLEX,
    Sharding,
    attention_fault,
    choose_attention,
    choose_device,
    choose_precision,
    copy_weights,
    emulated_bf16,
    fastest_attention,
    full_tensor,
    has_fast_bf16,
    own_part,
    read_sharding,
    shard,
    sharded_by_transformers,
    size_of,
)
from kinject.models.load import (
    LoadedModel,
    LoadOptions,
    check_model,
    load_config,
    load_model,
    load_tokenizer,
    stored_quantization,
)
from kinject.models.new import (
    check_config,
    check_saved_tokenizer,
    new_config,
    new_model,
    train_tokenizer,
)
