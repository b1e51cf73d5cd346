"""Modules of torch on a `Ragged`, unchanged: transformers, recurrent networks and losses, next to one sequence at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import close, random
from torch import nn
from torch.utils.data import DataLoader

import torch_manualgrad as mg
from torch_manualgrad.nested import Ragged, collate
from torch_manualgrad.testing import check

LENGTHS = (4, 1, 6, 3)
F64 = torch.float64


def sequences(*shape, lengths=LENGTHS, seed=0):
    return [random(n, *shape, seed=seed + i) for i, n in enumerate(lengths)]


def words(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(11, (n,), generator=generator) for n in lengths]


def same(found, expected):
    assert isinstance(found, Ragged) and len(found) == len(expected)
    for a, b in zip(found, expected):
        close(a, b)


class Model(nn.Module):
    """As it is written for a dense batch."""

    def __init__(self, norm_first=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens, is_causal=None, mask=None):
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=is_causal))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_and_its_gradients(norm_first, causal, training):
    torch.manual_seed(0)
    model = Model(norm_first).double().train(training)
    given, parameters = words(), list(model.parameters())
    tokens = Ragged.from_components(given)
    scores = model(tokens, is_causal=causal)
    masks = [nn.Transformer.generate_square_subsequent_mask(len(w), dtype=F64) if causal else None for w in given]
    alone = [model(w[None], mask=m)[0] for w, m in zip(given, masks)]
    same(scores, alone)
    targets = Ragged.from_components([w.flip(0) for w in given])
    losses = [
        F.cross_entropy(scores.transpose(1, 2), targets),
        F.cross_entropy(scores.flatten(0, 1), targets.flatten(0, 1)),
        F.cross_entropy(scores.view(-1, 11), targets.view(-1)),
    ]
    expected = F.cross_entropy(torch.cat(alone), torch.cat([w.flip(0) for w in given]))
    for loss in losses:
        close(loss, expected)
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        close(found, torch.autograd.grad(expected, parameters, retain_graph=True), rtol=1e-8)


def test_second_order_and_forward_mode_of_an_encoder_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0).double()
    x = Ragged.from_components(sequences(4, lengths=(3, 2)))
    check(lambda values: layer(x.like(values)).values, [(x.values,)])


@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("weights", [False, True])
def test_attention_with_a_mask(kind, weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    q, k = sequences(8), sequences(8, lengths=(2, 5, 3, 3), seed=9)
    mask = random(6, 5) if kind == "float" else random(6, 5) > 0.7
    if kind == "bool":
        mask[:, 0] = False
    queries, keys = Ragged.from_components(q), Ragged.from_components(k)
    found, shares = attention(queries, keys, keys, attn_mask=mask, need_weights=weights)
    alone = [
        attention(a[None], b[None], b[None], attn_mask=mask[: len(a), : len(b)], need_weights=weights)
        for a, b in zip(q, k)
    ]
    same(found, [y[0] for y, _ in alone])
    if weights:
        same(shares, [w[0] for _, w in alone])
    else:
        assert shares is None


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_attention_and_separate_projections(average):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=3, bias=False).double()
    q, k, v = sequences(8), sequences(5, seed=5), sequences(3, seed=7)
    batches = [Ragged.from_components(x) for x in (q, k, v)]
    found, shares = attention(*batches, average_attn_weights=average)
    alone = [attention(*[x[None] for x in row], average_attn_weights=average) for row in zip(q, k, v)]
    same(found, [y[0] for y, _ in alone])
    same(shares, [w[0] for _, w in alone])


def test_a_decoder_layer():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    q, k = sequences(8), sequences(8, lengths=(2, 5, 3, 3), seed=9)
    found = layer(Ragged.from_components(q), Ragged.from_components(k), tgt_is_causal=True)
    masks = [nn.Transformer.generate_square_subsequent_mask(len(x), dtype=F64) for x in q]
    same(found, [layer(a[None], b[None], tgt_mask=m)[0] for a, b, m in zip(q, k, masks)])


def test_dropout_of_attention():
    x = Ragged.from_components(sequences(2, 4, lengths=(40, 30))).transpose(1, 2)
    ones = Ragged.from_components([torch.ones_like(c) for c in x], ragged_dims=[2])
    torch.manual_seed(0)
    y = F.scaled_dot_product_attention(x, x, ones, dropout_p=0.25)
    assert y.values.std() > 0.05  # weights no longer add up to 1,
    assert abs(y.values.mean() - 1) < 0.1  # but do so in the mean
    torch.manual_seed(0)
    z = F.scaled_dot_product_attention(x, x, ones, dropout_p=0.25)
    assert torch.equal(y.values, z.values)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()  # which drops a tenth in training
    batch = Ragged.from_components(sequences(8))
    assert not torch.equal(layer(batch).values, layer(batch).values)
    assert torch.equal(layer.eval()(batch).values, layer(batch).values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}, "key_padding_mask: expected None, as a Ragged has no"),
        ({"attn_mask": torch.zeros(7, 7, dtype=F64)}, r"attn_mask: expected \[3, 3\], .* got a Tensor of shape \[7, 7\]"),
        ({"attn_mask": torch.zeros(4, 3, 3, dtype=F64)}, r"attn_mask: expected \[3, 3\]"),
        ({"key": torch.ones(2, 3, 8)}, "key: expected a Ragged"),
    ],
)  # fmt: skip
def test_attention_refuses(change, message):
    x = Ragged.from_components(sequences(8, lengths=(3, 2)))
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    with pytest.raises((ValueError, TypeError), match=message):
        attention(**({"query": x, "key": x, "value": x} | change))


def test_modules_that_cannot_take_sequences_of_unequal_lengths_say_so():
    x = Ragged.from_components(sequences(8))
    for options, message in (({"add_bias_kv": True}, "bias_k"), ({"add_zero_attn": True}, "add_zero_attn")):
        with pytest.raises(ValueError, match=message):
            nn.MultiheadAttention(8, 2, batch_first=True, **options).double()(x, x, x)
    with pytest.raises(TypeError, match="batch_first"):
        nn.MultiheadAttention(8, 2).double()(x, x, x)
    with pytest.raises(TypeError, match="is an argument of nn.MultiheadAttention only"):
        torch.exp(x.transpose(0, 1))


def test_packed_sequences():
    x = Ragged.from_components(sequences(3))
    same(Ragged.from_packed(x.to_packed()), list(x))
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5, batch_first=True).double()
    packed, (h, _) = lstm(x.to_packed())
    y = Ragged.from_packed(packed)
    same(y, [lstm(c[None])[0][0] for c in x])
    close(h[0], torch.stack([c[-1] for c in y]))
    values = x.values.clone().requires_grad_()
    (slope,) = torch.autograd.grad(Ragged.from_packed(x.like(values).to_packed()).square().values.sum(), values)
    close(slope, 2 * values)
    with pytest.raises(ValueError, match="to_packed: expected dim 1"):
        x.transpose(1, 2).to_packed()


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        self.words = words()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"words": self.words[i], "label": i % 2, "features": torch.ones(3) * i, "name": f"sentence {i}"}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader(workers):
    first, second = DataLoader(Sentences(), batch_size=2, collate_fn=collate, num_workers=workers)
    assert isinstance(first["words"], Ragged) and [len(c) for c in second["words"]] == [6, 3]
    assert torch.equal(first["words"][1], words()[1])
    assert first["label"].tolist() == [0, 1] and first["features"].shape == (2, 3)
    assert second["name"] == ["sentence 2", "sentence 3"]
    pairs = collate([(torch.ones(2), [1.0]), (torch.ones(2), [2.0])])
    assert isinstance(pairs[0], torch.Tensor) and pairs[1][0].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="samples"):
        collate([])
    one = torch.ones(2)
    for samples, ragged, message in (
        ([{"a": one}, {"b": one}], None, r"samples: expected the keys \['a'\], like the first, got \['b'\] at 1"),
        ([one, 3], None, "samples: expected Tensor, like the first, got 3 at 1"),
        ([(one,), {"a": one}], None, "samples: expected tuple, like the first, got {'a'"),
        ([{"word": one}], {"words"}, r"ragged: expected some of \['word'\], the entries of a sample, got \['words'\]"),
        ([(one, one)], [0, 2], r"ragged: expected some of \[0, 1\], the entries of a sample, got \[2\]"),
        ([one], [0], r"ragged: expected some of \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            collate(samples, ragged)


def test_which_tensors_of_a_batch_are_ragged():
    samples = [(torch.ones(2), torch.ones(3)), (torch.zeros(2), torch.zeros(3))]
    kinds = lambda **options: [isinstance(x, Ragged) for x in collate(samples, **options)]  # noqa: E731
    assert kinds() == [False, False] and kinds(ragged=True) == [True, True] and kinds(ragged={1}) == [False, True]
    named = collate([{"a": x, "n": 1} for x, _ in samples], ragged=["a"])
    assert isinstance(named["a"], Ragged) and named["n"].tolist() == [1, 1]
    assert len(collate([torch.ones(4)], ragged=True)) == 1
    with pytest.raises(RuntimeError):  # of torch, as the other entries have one shape
        collate([(torch.ones(2), torch.ones(3)), (torch.ones(1), torch.ones(3))], ragged={1})


LOSSES = {
    "mse_loss": {},
    "l1_loss": {},
    "smooth_l1_loss": {"beta": 0.5},
    "huber_loss": {"delta": 0.5},
    "binary_cross_entropy": {},
    "binary_cross_entropy_with_logits": {"pos_weight": torch.tensor([1.0, 2.0, 3.0], dtype=F64)},
    "kl_div": {"log_target": True},
    "poisson_nll_loss": {},
    "soft_margin_loss": {},
    "hinge_embedding_loss": {"margin": 0.5},
    "gaussian_nll_loss": {"var": 0.5},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_entries(name, reduction):
    if reduction == "batchmean" and name != "kl_div":
        return
    x, t = (Ragged.from_components([c.sigmoid() for c in sequences(3, seed=s)]) for s in (0, 5))
    loss, options = getattr(F, name), LOSSES[name]
    if reduction == "batchmean":
        close(loss(x, t, reduction=reduction, **options), loss(x.values, t.values, reduction="sum", **options) / 4)
        return
    found, expected = (
        loss(x, t, reduction=reduction, **options),
        loss(x.values, t.values, reduction=reduction, **options),
    )
    if reduction == "none":
        assert isinstance(found, Ragged)
        found = found.values
    close(found, expected)
    row = t.values[0]
    broadcast = loss(x, row, reduction=reduction, **options)
    expected = loss(x.values, row.expand_as(x.values), reduction=reduction, **options)
    close(broadcast.values if reduction == "none" else broadcast, expected)


def test_weights_of_losses():
    x, t, w = (Ragged.from_components(sequences(3, seed=s)) for s in (0, 5, 9))
    close(F.mse_loss(x, t, weight=w.abs()), F.mse_loss(x.values, t.values, weight=w.values.abs()))
    target = t.sigmoid()
    found = F.binary_cross_entropy(x.sigmoid(), target, weight=w.abs())
    close(found, F.binary_cross_entropy(x.values.sigmoid(), target.values, weight=w.values.abs()))
    found = nn.GaussianNLLLoss(full=True)(x, t, w.abs())
    close(found, F.gaussian_nll_loss(x.values, t.values, w.values.abs(), full=True))


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}, {"ignore_index": 2}]
)
def test_cross_entropy(options):
    scores, classes = sequences(5), [w % 5 for w in words()]
    x, t = Ragged.from_components(scores).transpose(1, 2), Ragged.from_components(classes)
    found, expected = (
        F.cross_entropy(x, t, **options),
        F.cross_entropy(torch.cat(scores), torch.cat(classes), **options),
    )
    close(found.values if options.get("reduction") == "none" else found, expected)
    shares = Ragged.from_components([s.softmax(-1) for s in sequences(5, seed=4)]).transpose(1, 2)
    if "ignore_index" not in options:
        found = F.cross_entropy(x, shares, **options)
        expected = F.cross_entropy(torch.cat(scores), shares.values.mT, **options)
        close(found.values if options.get("reduction") == "none" else found, expected)
    if "label_smoothing" not in options:
        rows = F.log_softmax(torch.cat(scores), -1)
        found = F.nll_loss(F.log_softmax(x, 1), t, **options)
        close(
            found.values if options.get("reduction") == "none" else found,
            F.nll_loss(rows, torch.cat(classes), **options),
        )


def test_cross_entropy_with_further_dims():
    images = [random(5, n, 3, seed=n) for n in LENGTHS]
    classes = [torch.randint(5, (n, 3), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    x, t = Ragged.from_components(images), Ragged.from_components(classes)
    alone = [F.cross_entropy(i[None], c[None], reduction="none")[0] for i, c in zip(images, classes)]
    same(F.cross_entropy(x, t, reduction="none"), alone)
    close(F.cross_entropy(x, t), torch.cat([a.flatten() for a in alone]).mean())


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_losses_without_a_reduction_have_components_however_that_is_said():
    x, classes = Ragged.from_components(sequences(5)), Ragged.from_components([w % 5 for w in words()])
    for options in ({"reduction": "none"}, {"reduce": False}):
        same(F.mse_loss(x, 2 * x, **options), [c.square() for c in x])
        found = F.cross_entropy(x.transpose(1, 2), classes, **options)
        same(found, [F.cross_entropy(c, t, reduction="none") for c, t in zip(x, classes)])


def test_cross_entropy_refuses():
    scores, classes = Ragged.from_components(sequences(5)), Ragged.from_components([w % 5 for w in words()])
    with pytest.raises(ValueError, match=r"classes in dim 1.*transpose\(1, 2\)"):
        F.cross_entropy(scores, classes)
    with pytest.raises(ValueError, match=r"target: the lengths differ: \[4, 1, 6, 3\] and \[1, 4, 6, 3\]"):
        F.cross_entropy(scores.transpose(1, 2), Ragged.from_components([w % 5 for w in words((1, 4, 6, 3))]))
    with pytest.raises(TypeError, match="cross_entropy: expected a Ragged"):
        F.cross_entropy(scores.transpose(1, 2), torch.zeros(4, 6).long())


def test_an_embedding():
    net = nn.Embedding(11, 4, padding_idx=0).double()
    x = Ragged.from_components(words())
    same(net(x), [net(w) for w in words()])
    (slope,) = torch.autograd.grad(net(x).square().sum((1, 2)).sum(), net.weight)
    (expected,) = torch.autograd.grad(net(torch.cat(words())).square().sum(), net.weight)
    close(slope, expected)
    same(F.one_hot(x, 11), [F.one_hot(w, 11) for w in words()])
    same(x.positions(), [torch.arange(len(w)) for w in words()])


def test_a_model_of_these_is_compiled():
    torch.manual_seed(0)
    model = Model().double().eval()
    tokens = Ragged.from_components(words())
    targets = Ragged.from_components([w.flip(0) for w in words()])

    def loss(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(0, 1))

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager")
    close(compiled(tokens, targets), loss(tokens, targets))
    found = torch.autograd.grad(compiled(tokens, targets), list(model.parameters()))
    close(found, torch.autograd.grad(loss(tokens, targets), list(model.parameters())))


def test_all_modes_of_a_masked_attention():
    x = Ragged.from_components([random(2, n, 3, seed=n) for n in (3, 2)])
    mask = random(3, 3)
    check(
        lambda q, v: mg.nested.scaled_dot_product_attention(x.like(q), x, x.like(v), mask).values,
        [(x.values, x.values.flip(1))],
    )


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_attention_of_no_sequences(weights, average):
    """A filter may leave none of a batch."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = Ragged(torch.zeros(0, 8, dtype=F64), torch.tensor([0]), (0, None, 8))
    y, shares = attention(x, x, x, need_weights=weights, average_attn_weights=average)
    assert y.shape == (0, None, 8) and y.requires_grad
    assert shares is None if not weights else shares.shape == ((0, None, None) if average else (0, 2, None, None))


# -- in a graph ---------------------------------------------------------------------------------------------------------


class Sentence(nn.Module):
    """With layers of torch that pass options by position, such as whether to write to the argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.activations = nn.Sequential(
            nn.Hardtanh(), nn.Threshold(-0.9, -0.8), nn.ELU(), nn.SELU(), nn.CELU(), nn.LeakyReLU(), nn.Dropout(0.0)
        )
        self.loss = nn.BCEWithLogitsLoss(weight=torch.rand(8), pos_weight=torch.rand(8))

    def forward(self, x):
        y = self.activations(self.layer(x, is_causal=True))
        classes = F.cross_entropy(y.transpose(1, 2), (x[..., 0] > 0).long(), None, None, -100, None, "sum")
        return self.loss(y, (x > 0).double()) + classes


@pytest.mark.parametrize("backend", ["eager", pytest.param("manualgrad", marks=pytest.mark.slow)])
def test_a_layer_and_its_loss_are_one_graph(backend):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Sentence().double()
    compiled, parameters = torch.compile(model, backend=backend, fullgraph=True), list(model.layer.parameters())
    for lengths in (LENGTHS, (3, 5, 1)):
        x = Ragged.from_components(sequences(8, lengths=lengths))
        found, expected = compiled(x), model(x)
        close(found, expected)
        for a, b in zip(*(torch.autograd.grad(loss, parameters) for loss in (found, expected))):
            close(a, b, rtol=1e-8)


@pytest.mark.parametrize("kind", ["mask", "dropout", "weights"])
def test_attention_that_reads_lengths_ends_a_graph(kind):
    """Sequence by sequence there, too: a mask of the longest sequence does not fit one of all."""
    torch.manual_seed(0)
    torch.compiler.reset()
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5 if kind == "dropout" else 0.0).double()
    x, mask = Ragged.from_components(sequences(8)), random(6, 6) if kind == "mask" else None

    def program(x):
        y, shares = attention(x * 2, x, x, need_weights=kind == "weights", attn_mask=mask)
        return y * 2, shares

    found = []
    for f in (program, torch.compile(program, backend="eager")):
        torch.manual_seed(1)
        found.append(f(x))
    (expected, weights), (y, shares) = found
    same(y, list(expected))
    assert kind != "weights" or all(torch.allclose(a, b) for a, b in zip(shares, weights))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention of a Ragged reads the lengths"):
        torch.compile(program, backend="eager", fullgraph=True)(x)
