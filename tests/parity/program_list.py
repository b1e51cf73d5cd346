"""Programs of packages from pip: each a model of its smallest size with random weights, and the loss of one step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, Callable[[nn.Module, int], Tensor]]  # the model, and its loss at a step


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        build: given the dtype, makes the model, and the function that gives its loss at a step.
        heavy: compiling it takes minutes.
        single: it computes a part in single precision, whatever the dtype.
    """

    name: str
    package: str
    build: Callable[[torch.dtype], Built]
    heavy: bool = False
    single: bool = False

    @property
    def available(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


PROGRAMS: dict[str, Program] = {}


def program(package: str, heavy: bool = False, single: bool = False) -> Callable[[Any], Any]:
    def add(build: Callable[[torch.dtype], Built]) -> Callable[[torch.dtype], Built]:
        name = build.__name__.removeprefix("_")
        PROGRAMS[name] = Program(name, package, build, heavy, single)
        return build

    return add


def random(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(dtype)


def integers(step: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(step))


# -- torch itself -----------------------------------------------------------------------------------------------------


@program("torch")
def _mlp(dtype: torch.dtype) -> Built:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3))
    return model.to(dtype), lambda m, i: F.cross_entropy(m(random(i, 8, 6, dtype=dtype)), integers(i, 3, 8))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(11, 5, mode="mean")
        self.tokens = nn.Embedding(11, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 6, 2, bidirectional=True, dropout=0.1, proj_size=4, batch_first=True)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.rnn = nn.RNN(6, 4, nonlinearity="relu")
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False)
        y = self.gru(self.lstm(x)[0])[0]
        padded, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        z, _ = self.rnn(padded)
        h, _ = self.cell(z[:, -1])
        return h.sum(-1) + self.embedding(tokens).sum(-1)


@program("torch")
def _recurrent(dtype: torch.dtype) -> Built:
    return _Recurrent().to(dtype), lambda m, i: m(integers(i, 11, 3, 7), torch.tensor([7, 3, 5])).square().mean()


@program("torch")
def _transformer(dtype: torch.dtype) -> Built:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def loss(m: nn.Module, i: int) -> Tensor:
        source, target = random(i, 2, 6, 8, dtype=dtype), random(i + 9, 2, 5, 8, dtype=dtype)
        return m(source, target, tgt_mask=mask, src_key_padding_mask=padding).square().mean()

    return model.to(dtype), loss


@program("torch")
def _speech_ctc(dtype: torch.dtype) -> Built:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, stride=2), nn.BatchNorm1d(8), nn.PReLU(), nn.Conv1d(8, 8, 3, groups=4, padding="same"), nn.Mish(),
        nn.GroupNorm(2, 8), nn.Conv1d(8, 6, 1),
    )  # fmt: skip

    def loss(m: nn.Module, i: int) -> Tensor:
        scores = m(random(i, 3, 4, 30, dtype=dtype)).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(scores, integers(i, 5, 3, 4) + 1, torch.tensor([14, 12, 9]), torch.tensor([4, 3, 2]))

    return model.to(dtype), loss


@program("torch")
def _parametrized(dtype: torch.dtype) -> Built:
    from torch.nn.utils import parametrizations as p

    model = nn.Sequential(
        p.weight_norm(nn.Conv2d(2, 4, 3)), nn.InstanceNorm2d(4, affine=True), nn.SiLU(),
        p.spectral_norm(nn.Conv2d(4, 4, 3)), nn.AdaptiveAvgPool2d(2), nn.Flatten(), p.orthogonal(nn.Linear(16, 8)),
        nn.Softplus(), nn.utils.spectral_norm(nn.Linear(8, 3)), nn.utils.weight_norm(nn.Linear(3, 3)),
    )  # fmt: skip
    return model.to(dtype), lambda m, i: F.smooth_l1_loss(
        m(random(i, 3, 2, 9, 9, dtype=dtype)), random(i, 3, 3, dtype=dtype)
    )


@program("torch")
def _unet(dtype: torch.dtype) -> Built:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle = (
                nn.Conv2d(3, 6, 3, padding=1),
                nn.Conv2d(6, 6, 3, padding=1, dilation=1, padding_mode="reflect"),
            )
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
            self.up, self.out = nn.ConvTranspose2d(6, 6, 2, stride=2), nn.Conv2d(12, 4, 1)
            self.shuffle = nn.PixelShuffle(2)

        def forward(self, x: Tensor) -> Tensor:
            a = F.leaky_relu(self.down(x), 0.1, inplace=True)
            b, places = self.pool(a)
            c = F.elu(self.middle(b))
            d = torch.cat([self.up(c), self.unpool(c, places) + a], 1)
            e = F.interpolate(self.out(d), scale_factor=2, mode="bicubic", align_corners=False)
            f = F.interpolate(e, size=(8, 8), mode="bilinear") + F.avg_pool2d(e, 2)[..., :8, :8]
            return self.shuffle(F.hardswish(f))

    return UNet().to(dtype), lambda m, i: F.huber_loss(
        m(random(i, 2, 3, 8, 8, dtype=dtype)), random(i, 2, 1, 16, 16, dtype=dtype)
    )


@program("torch")
def _vae(dtype: torch.dtype) -> Built:
    from torch import distributions as D

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.encoder(x).chunk(2, -1)
            scale = F.softplus(b) + 0.1
            normal = D.Normal(a, scale)
            others = [
                D.Gamma(scale, scale).rsample(), D.Beta(scale, scale + 1).rsample(), D.LogNormal(a, scale).rsample().clamp(max=5),
                D.Laplace(a, scale).rsample(), D.StudentT(scale + 3, a, scale).rsample(), D.Kumaraswamy(scale + 1, scale + 1).rsample(),
                D.Dirichlet(scale).rsample(), D.RelaxedBernoulli(scale.new_tensor(0.7), logits=a).rsample(),
                D.MultivariateNormal(a, scale_tril=torch.diag_embed(scale)).rsample(),
                D.RelaxedOneHotCategorical(scale.new_tensor(0.7), logits=a).rsample(),
            ]  # fmt: skip
            z = torch.cat([normal.rsample() + sum(others), a], -1)
            kl = (
                D.kl_divergence(normal, D.Normal(0, 1)).mean()
                + D.kl_divergence(D.Gamma(scale, scale), D.Gamma(1.0, 2.0)).mean()
            )
            return (
                F.binary_cross_entropy_with_logits(self.decoder(z), x.sigmoid())
                + kl
                - D.VonMises(a, scale).log_prob(a * 0.5).mean()
            )

    return VAE().to(dtype), lambda m, i: m(random(i, 5, 6, dtype=dtype))


@program("torch")
def _fake_quantized(dtype: torch.dtype) -> Built:
    from torch.ao import quantization as q

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model.train().qconfig = q.get_default_qat_qconfig("fbgemm")
    model = q.prepare_qat(q.fuse_modules_qat(model, [["0", "1", "2"]]))
    if dtype is not torch.float32:
        raise NotImplementedError("observers are of float32")
    return model, lambda m, i: F.cross_entropy(m(random(i, 4, 1, 8, 8)), integers(i, 3, 4), label_smoothing=0.1)


@program("torch")
def _spectral(dtype: torch.dtype) -> Built:
    """Fourier layers, a spectrogram, complex parameters, sparse products, scatters."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(2, 2, 5, dtype=torch.complex128 if dtype is torch.float64 else torch.complex64)
            )
            self.out = nn.Linear(16, 4, dtype=dtype)
            self.graph = torch.sparse_coo_tensor(
                torch.tensor([[0, 1, 3], [1, 2, 0]]), torch.tensor([1.0, 2.0, 3.0], dtype=dtype), (4, 4)
            )

        def forward(self, x: Tensor) -> Tensor:
            y = torch.fft.irfft(torch.einsum("bif,iof->bof", torch.fft.rfft(x)[..., :5], self.weight), n=16)
            s = (
                torch.stft(x.flatten(0, 1), 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True)
                .abs()
                .clamp_min(1e-3)
            )
            z = torch.sparse.mm(self.graph, self.out(F.glu(torch.cat([y, y], -1), -1)[:, 0]).mT)
            pooled = torch.zeros_like(z).index_add(0, torch.tensor([1, 1, 0, 3]), z).scatter_reduce(
                0, torch.tensor([[0] * z.shape[1]]), z[:1], "amax")  # fmt: skip
            return pooled.cumsum(0).logsumexp(0).mean() + s.log().std() + y.sort(-1).values.diff().prod(-1).sum()

    return Spectral(), lambda m, i: m(random(i, 4, 2, 16, dtype=dtype))


# -- torchvision ------------------------------------------------------------------------------------------------------


def _classifier(make: Callable[[], nn.Module], size: int, dtype: torch.dtype, batch: int = 2) -> Built:
    return make().to(dtype), lambda m, i: F.cross_entropy(
        m(random(i, batch, 3, size, size, dtype=dtype)), integers(i, 5, batch)
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
    return model, lambda m, i: F.cross_entropy(
        m(random(i, 2, 3, 48, 48, dtype=dtype))["out"], integers(i, 4, 2, 48, 48)
    )


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
        return sum(m([random(i, 3, 64, 64, dtype=dtype).sigmoid()], targets).values())

    return model.to(dtype), loss


# -- timm -------------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int, **options: Any) -> None:
    def build(dtype: torch.dtype) -> Built:
        import timm

        return _classifier(lambda: timm.create_model(name, num_classes=5, **options), size, dtype, batch=2)

    build.__name__ = name
    program("timm", heavy=True)(build)


_timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
_timm("efficientnet_b0", 32, channel_multiplier=0.1, depth_multiplier=0.1)
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
          lambda i, dtype: {"input_features": random(i, 2, 8, 24, dtype=dtype), "labels": integers(i, 60, 2, 6)},
          vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
          encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=12, max_target_positions=16,
          pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
_language("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC",
          lambda i, dtype: {"input_values": random(i, 2, 400, dtype=dtype), "labels": integers(i, 58, 2, 3) + 1},
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
          lambda i, dtype: {"input_ids": integers(i, 60, 2, 9), "pixel_values": random(i, 2, 3, 16, 16, dtype=dtype), "return_loss": True},
          text_config={**_SMALL, "max_position_embeddings": 16, "eos_token_id": 2}, vision_config=_VISION, projection_dim=8)  # fmt: skip
_language("segformer", "SegformerConfig", "SegformerForSemanticSegmentation",
          lambda i, dtype: {"pixel_values": random(i, 2, 3, 32, 32, dtype=dtype), "labels": integers(i, 2, 2, 32, 32)},
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
            random(i, 2, 4, 8, 8, dtype=dtype),
            random(i + 9, 2, 4, 8, 8, dtype=dtype),
            integers(i, 50, 2),
        )
        return F.mse_loss(m(schedule.add_noise(image, noise, at), at, random(i, 2, 3, 8, dtype=dtype)).sample, noise)

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
        image = random(i, 2, 3, 16, 16, dtype=dtype)
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
            return F.nll_loss(m(random(i, 20, 5, dtype=dtype), integers(i, 20, 2, 60), batch), integers(i, 3, 3))

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
                q.new_ones(2, 9, 2) + self.move.sum() * random(3, 2, 9, 2, dtype=dtype), random(4, 2, 9, 2, dtype=dtype)
            )
            return (
                K.losses.ssim_loss(edges, x, 5) + q.abs().sum() + K.losses.total_variation(x).mean() + F8.square().sum()
            )

    return Warp().to(dtype), lambda m, i: m(random(i, 2, 3, 12, 12, dtype=dtype))


@program("gpytorch")
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

    x = random(1, 8, 2, dtype=dtype).sigmoid()
    gp = SingleTaskGP(x, (x * 4).sin().sum(-1, keepdim=True)).eval()
    gain = qLogExpectedImprovement(gp, best_f=1.0, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=3))

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(random(2, 3, 2, dtype=dtype).sigmoid())

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
        start, times = random(i, 2, 3, dtype=dtype), torch.linspace(0, 1, 4, dtype=dtype)
        ends = odeint(m, start, times, method="rk4") + odeint_adjoint(
            m, start, times, method="dopri5", rtol=1e-5, atol=1e-5
        )
        return ends.square().mean()

    return Field().to(dtype), loss
