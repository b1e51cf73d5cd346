"""Programs of torchvision, timm, transformers, diffusers, torch_geometric, kornia, gpytorch, botorch and torchdiffeq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from program_list import Built, drawn, integers, program
from torch import Tensor, nn
from torch.nn import functional as F

# -- torchvision ------------------------------------------------------------------------------------------------------


def _classifier(make: Callable[[], nn.Module], size: int, dtype: torch.dtype, batch: int = 2) -> Built:
    return make().to(dtype), lambda m, i: F.cross_entropy(
        m(drawn(i, batch, 3, size, size, dtype=dtype)), integers(i, 5, batch)
    )


@program("torchvision", heavy=True)
def _resnet18(dtype: torch.dtype) -> Built:
    from torchvision.models import resnet18

    return _classifier(lambda: resnet18(num_classes=5), 33, dtype, batch=4)


@program("torchvision")
def _vit(dtype: torch.dtype) -> Built:
    from torchvision.models import VisionTransformer

    return _classifier(lambda: VisionTransformer(16, 8, 2, 2, 16, 32, 0.1, 0.1, 5), 16, dtype)


@program("torchvision", heavy=True)
def _swin(dtype: torch.dtype) -> Built:
    from torchvision.models import SwinTransformer

    return _classifier(lambda: SwinTransformer([4, 4], 12, [2, 2], [2, 2], [3, 3], num_classes=5), 24, dtype)


@program("torchvision", heavy=True)
def _mobilenet_v3(dtype: torch.dtype) -> Built:
    from torchvision.models import mobilenet_v3_small

    return _classifier(lambda: mobilenet_v3_small(num_classes=5), 40, dtype, batch=4)


@program("torchvision", heavy=True)
def _lraspp_segmentation(dtype: torch.dtype) -> Built:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).to(dtype)
    return model, lambda m, i: F.cross_entropy(m(drawn(i, 2, 3, 48, 48, dtype=dtype))["out"], integers(i, 4, 2, 48, 48))


@program("torchvision", heavy=True)
def _retinanet(dtype: torch.dtype) -> Built:
    from torchvision.models import mobilenet_v3_small
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = mobilenet_v3_small().features
    backbone.out_channels = 576
    model = RetinaNet(
        backbone, 3, anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)), min_size=64, max_size=64
    )

    def loss(m: nn.Module, i: int) -> Tensor:
        boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0], [20.0, 8.0, 60.0, 30.0]], dtype=dtype)
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])}]
        return sum(m([drawn(i, 3, 64, 64, dtype=dtype).sigmoid()], targets).values())

    return model.to(dtype), loss


# -- timm -------------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int, batch: int = 2, **options: Any) -> None:
    def build(dtype: torch.dtype) -> Built:
        import timm

        return _classifier(lambda: timm.create_model(name, num_classes=5, **options), size, dtype, batch)

    build.__name__ = name
    program("timm", heavy=True)(build)


_timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
# of 2 images of 32 pixels, a rounding of the input grows to the size of the gradients in five steps
_timm("test_efficientnet", 64, batch=4)
_timm("mixer_s32_224", 32, img_size=32, num_blocks=2, embed_dim=16)
_timm("deit3_small_patch16_224", 32, img_size=32, depth=2, embed_dim=24, num_heads=2, drop_path_rate=0.2)
_timm("gmlp_s16_224", 32, img_size=32, num_blocks=2, embed_dim=16)
_timm("xcit_nano_12_p16_224", 32, img_size=32, depth=2, embed_dim=16, num_heads=2)
_timm("coat_tiny", 32, img_size=32, embed_dims=(8, 8, 8, 8), num_heads=2)
_timm("nfnet_f0", 32, width_factor=0.1)
_timm("regnety_002", 32)
_timm("mobilevit_xxs", 64)

# -- transformers -----------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def _language(
    name: str, kind: str, model: str, inputs: Callable[[int, torch.dtype], dict[str, Any]] | None = None, **options: Any
) -> None:
    def build(dtype: torch.dtype) -> Built:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, kind)(**options))

        def loss(m: nn.Module, i: int) -> Tensor:
            tokens = integers(i, 60, 2, 9)
            if inputs is not None:
                return m(**inputs(i, dtype)).loss
            mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
            return m(input_ids=tokens, attention_mask=mask, labels=tokens).loss

        return made.to(dtype), loss

    build.__name__ = name
    program("transformers", single=True)(build)  # their norms


_language("bert", "BertConfig", "BertForMaskedLM", **_SMALL)
_language("gpt2", "GPT2Config", "GPT2LMHeadModel", vocab_size=60, n_embd=16, n_layer=2, n_head=2)
_language("llama", "LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1, **_SMALL)
_language(
    "llama_eager", "LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1, attn_implementation="eager", **_SMALL
)
_language("gemma2", "Gemma2Config", "Gemma2ForCausalLM", num_key_value_heads=1, head_dim=8, sliding_window=4, **_SMALL)
_language(
    "mixtral",
    "MixtralConfig",
    "MixtralForCausalLM",
    num_key_value_heads=1,
    num_local_experts=3,
    output_router_logits=True,
    **_SMALL,
)
_language("mamba", "MambaConfig", "MambaForCausalLM", vocab_size=60, hidden_size=16, num_hidden_layers=2, state_size=4)
_language(
    "mamba2",
    "Mamba2Config",
    "Mamba2ForCausalLM",
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    num_heads=4,
    head_dim=8,
    n_groups=1,
    chunk_size=4,
)
_language(
    "deberta",
    "DebertaV2Config",
    "DebertaV2ForMaskedLM",
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    max_relative_positions=8,
    **_SMALL,
)
_language(
    "longformer",
    "LongformerConfig",
    "LongformerForMaskedLM",
    attention_window=[4, 4],
    max_position_embeddings=32,
    **_SMALL,
)
_language(
    "rwkv",
    "RwkvConfig",
    "RwkvForCausalLM",
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    attention_hidden_size=16,
)
_language("fnet", "FNetConfig", "FNetForMaskedLM", **{k: v for k, v in _SMALL.items() if k != "num_attention_heads"})
_language("t5", "T5Config", "T5ForConditionalGeneration",
          lambda i, dtype: {"input_ids": integers(i, 60, 2, 9), "labels": integers(i + 5, 60, 2, 6)},
          vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)  # fmt: skip
_language("whisper", "WhisperConfig", "WhisperForConditionalGeneration",
          lambda i, dtype: {"input_features": drawn(i, 2, 8, 24, dtype=dtype), "labels": integers(i, 60, 2, 6)},
          vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
          encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=12, max_target_positions=16,
          pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
_language("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC",
          lambda i, dtype: {"input_values": drawn(i, 2, 400, dtype=dtype), "labels": integers(i, 58, 2, 3) + 1},
          conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
          num_conv_pos_embedding_groups=2, mask_time_prob=0.0, **_SMALL)  # fmt: skip
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
_language("clip", "CLIPConfig", "CLIPModel",
          lambda i, dtype: {"input_ids": integers(i, 60, 2, 9), "pixel_values": drawn(i, 2, 3, 16, 16, dtype=dtype), "return_loss": True},
          text_config={**_SMALL, "max_position_embeddings": 16, "eos_token_id": 2}, vision_config=_VISION, projection_dim=8)  # fmt: skip
_language("segformer", "SegformerConfig", "SegformerForSemanticSegmentation",
          lambda i, dtype: {"pixel_values": drawn(i, 2, 3, 32, 32, dtype=dtype), "labels": integers(i, 2, 2, 32, 32)},
          depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16, num_labels=3)  # fmt: skip


# -- others -----------------------------------------------------------------------------------------------------------


@program("diffusers", heavy=True)
def _diffusion(dtype: torch.dtype) -> Built:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule = DDPMScheduler(50)

    def loss(m: nn.Module, i: int) -> Tensor:
        image, noise, at = (
            drawn(i, 2, 4, 8, 8, dtype=dtype),
            drawn(i + 9, 2, 4, 8, 8, dtype=dtype),
            integers(i, 50, 2),
        )
        return F.mse_loss(m(schedule.add_noise(image, noise, at), at, drawn(i, 2, 3, 8, dtype=dtype)).sample, noise)

    return model.to(dtype), loss


@program("diffusers", heavy=True)
def _autoencoder(dtype: torch.dtype) -> Built:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )

    def loss(m: nn.Module, i: int) -> Tensor:
        image = drawn(i, 2, 3, 16, 16, dtype=dtype)
        found = m.encode(image).latent_dist
        return F.l1_loss(m.decode(found.sample()).sample, image) + found.kl().mean() * 1e-3

    return model.to(dtype), loss


def _graph(name: str, layers: Callable[[Any], list[Any]]) -> None:
    def build(dtype: torch.dtype) -> Built:
        from torch_geometric import nn as g

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(layers(g))
                self.norm, self.readout = g.GraphNorm(8), nn.Linear(8, 3)

            def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
                for layer in self.layers:
                    x = F.dropout(F.elu(layer(x, edges)), 0.1, self.training)
                x = self.norm(x, batch)
                x = g.global_mean_pool(x, batch) + g.global_max_pool(x, batch) + g.global_add_pool(x, batch)
                return F.log_softmax(self.readout(x), -1)

        def loss(m: nn.Module, i: int) -> Tensor:
            batch = torch.arange(20).div(7, rounding_mode="floor")
            return F.nll_loss(m(drawn(i, 20, 5, dtype=dtype), integers(i, 20, 2, 60), batch), integers(i, 3, 3))

        return Net().to(dtype), loss

    build.__name__ = name
    program("torch_geometric")(build)


_graph("gcn", lambda g: [g.GCNConv(5, 8), g.GCNConv(8, 8)])
_graph("gat", lambda g: [g.GATv2Conv(5, 4, heads=2), g.GATConv(8, 8), g.TransformerConv(8, 8)])
_graph(
    "graph_others",
    lambda g: [
        g.SAGEConv(5, 8, aggr=["mean", "max", "std", "softmax"]),
        g.GINConv(nn.Linear(8, 8)),
        g.ChebConv(8, 8, 3),
        g.PNAConv(8, 8, ["mean", "min"], ["identity", "attenuation"], torch.tensor([1, 3, 4])),
    ],
)


@program("kornia")
def _kornia(dtype: torch.dtype) -> Built:
    import kornia as K

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angle, self.move = nn.Parameter(torch.tensor([0.3, -0.2])), nn.Parameter(torch.randn(2, 8))
            self.axis = nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = K.geometry.transform.rotate(x, self.angle * 20)
            corners = x.new_tensor([[[0, 0], [11, 0], [11, 11], [0, 11]]]).expand(2, 4, 2)
            H = K.geometry.transform.get_perspective_transform(corners, corners + self.move.view(2, 4, 2).tanh())
            x = K.geometry.transform.warp_perspective(x, H, (12, 12))
            R = K.geometry.conversions.axis_angle_to_rotation_matrix(self.axis)
            q = K.geometry.conversions.rotation_matrix_to_quaternion(R)
            x = K.filters.gaussian_blur2d(K.enhance.adjust_hue(x.sigmoid(), 0.1), (3, 3), (1.0, 1.0))
            edges = (
                K.filters.sobel(K.color.rgb_to_lab(x))
                + K.filters.median_blur(x, (3, 3))
                + K.filters.bilateral_blur(x, 3, 0.1, (1.5, 1.5))
            )
            F8 = K.geometry.epipolar.find_fundamental(
                q.new_ones(2, 9, 2) + self.move.sum() * drawn(3, 2, 9, 2, dtype=dtype), drawn(4, 2, 9, 2, dtype=dtype)
            )
            return (
                K.losses.ssim_loss(edges, x, 5) + q.abs().sum() + K.losses.total_variation(x).mean() + F8.square().sum()
            )

    return Warp().to(dtype), lambda m, i: m(drawn(i, 2, 3, 12, 12, dtype=dtype))


@program("gpytorch", one_thread=True)  # its settings
def _gaussian_process(dtype: torch.dtype) -> Built:
    import gpytorch as g

    x = torch.linspace(0, 1, 12, dtype=dtype)

    class GP(g.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, x.sin(), g.likelihoods.GaussianLikelihood())
            self.mean, self.kernel = (
                g.means.LinearMean(1),
                g.kernels.ScaleKernel(g.kernels.MaternKernel(2.5) + g.kernels.PeriodicKernel()),
            )

        def forward(self, x: Tensor) -> Any:
            return g.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def loss(m: nn.Module, i: int) -> Tensor:
        return -g.mlls.ExactMarginalLogLikelihood(m.likelihood, m)(m(x), (5 * x + i).sin())

    return GP().to(dtype), loss


@program("botorch")
def _botorch(dtype: torch.dtype) -> Built:
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = drawn(1, 8, 2, dtype=dtype).sigmoid()
    gp = SingleTaskGP(x, (x * 4).sin().sum(-1, keepdim=True)).eval()
    gain = qLogExpectedImprovement(gp, best_f=1.0, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=3))

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(drawn(2, 3, 2, dtype=dtype).sigmoid())

        def forward(self) -> Tensor:
            return -gain(self.at).sum()

    return Choice(), lambda m, i: m()


@program("torchdiffeq")
def _neural_ode(dtype: torch.dtype) -> Built:
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y) * t.cos()

    def loss(m: nn.Module, i: int) -> Tensor:
        start, times = drawn(i, 2, 3, dtype=dtype), torch.linspace(0, 1, 4, dtype=dtype)
        ends = odeint(m, start, times, method="rk4") + odeint_adjoint(
            m, start, times, method="dopri5", rtol=1e-5, atol=1e-5
        )
        return ends.square().mean()

    return Field().to(dtype), loss
