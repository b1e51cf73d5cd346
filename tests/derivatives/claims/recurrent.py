"""Recurrent layers."""

from claims import own

PROOFS = {
    "aten::mkldnn_rnn_layer": {"missing": [own("fwd")]},
    "aten::_thnn_fused_lstm_cell": {"missing": [own("fwd")]},
    "aten::_thnn_fused_gru_cell": {"missing": [own("fwd")]},
    "aten::_cudnn_rnn": {"missing": [own("fwd")]},
}
