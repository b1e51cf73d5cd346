"""Normalizations and attention."""

from claims import own

PROOFS = {
    "aten::native_layer_norm": {"values": [own("fwd-fwd")]},
    "aten::native_layer_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_batch_norm": {"values": [own("fwd-fwd")]},
    "aten::_native_batch_norm_legit.no_stats": {"values": [own("fwd-fwd")]},
    "aten::native_batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_group_norm_backward": {"missing": [own("rev")]},
    "aten::_scaled_dot_product_flash_attention_for_cpu": {"missing": [own("fwd")]},
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": {"missing": [own("rev")]},
}
