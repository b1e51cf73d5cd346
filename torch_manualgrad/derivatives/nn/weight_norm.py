"""Weight normalization, $w = v g / |v|$, where the norm is along all dims but one.

With $u = v / |v|$ and $<.>$ the sum along these dims, and a cotangent $G$ of $w$:

    dw = dg u + g du,    du = (dv - u <u dv>) / |v|;        gg = <G u>,    gv = g A / |v|,    A = G - u <G u>.

$(gv, gg)$ is a gradient, so its derivative in $v$ and $g$ is symmetric: tangents of the two are also their cotangents,

    dgg = <dG u> + <G du>,    dgv = (dg - g <u dv> / |v|) A / |v| + g (dG - du <G u> - u dgg) / |v|.

The norms that the operator returns are constants to autograd. Formulas that are differentiated again treat them as
functions of $v$, and use the saved norms only as a scale at which nothing overflows.

Args:
    v, saved_v: the direction, real.
    g, saved_g: the norm of $w$, of size 1 along all dims but ``dim``.
    saved_norms: $|v|$ as _weight_norm_interface returns it; a function of $v$ here.
    dim: the one dim along which the norm is not taken.
    grad_w: $G$, the shape of ``saved_v``.
    v_t, g_t, grad_w_t, saved_v_t, saved_g_t: tangents; None for zero.

Note:
    Where not differentiable: at $v = 0$. The result is nan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .normalization import constant, wide, widened


class _Weight:
    """$u$, $|v|$, and sums along the dims of the norm."""

    def __init__(self, v: Tensor, norms: Tensor, dim: int) -> None:
        self.dims = [d for d in range(v.dim()) if d != dim % v.dim()]
        scale = constant(wide(norms))
        scaled = wide(v) / scale
        relative = self.sum(scaled.square()).sqrt()
        self.u, self.norm = scaled / relative, scale * relative

    def sum(self, x: Tensor) -> Tensor:
        return x.sum(self.dims, keepdim=True) if self.dims else x

    def along(self, v_t: Tensor) -> Tensor:
        """$du$."""
        return (v_t - self.u * self.sum(self.u * v_t)) / self.norm


@formula
def weight_norm_jvp(
    v: Tensor, v_t: Tensor | None, g: Tensor, g_t: Tensor | None, saved_norms: Tensor, dim: int
) -> Tensor:
    """Tangent of $w$: $dg u + g du$.

    Returns:
        The shape of $v$.

    References:
        Salimans, Kingma, Weight Normalization, arXiv:1602.07868, eq. 3.
    """
    w = _Weight(v, saved_norms, dim)
    v_t, g_t, wide_g = widened(v_t, g_t, g)
    found = torch.zeros_like(w.u) if v_t is None else wide_g * w.along(v_t)
    return (found if g_t is None else found + g_t * w.u).to(v.dtype)


def _sizes_fit(saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int) -> str:
    """An error message if the arguments of `weight_norm_backward` do not fit, else "". Its kernel does not check them."""
    if not saved_v.dim() or dim not in (0, saved_v.dim() - 1):
        return f"dim: expected the first or the last of the {saved_v.dim()} dims of saved_v, got {dim}"
    sizes = [n if i == dim else 1 for i, n in enumerate(saved_v.shape)]
    for name, x in (("saved_g", saved_g), ("saved_norms", saved_norms)):
        if list(x.shape) != sizes:
            return f"{name}: expected shape {sizes}, got {list(x.shape)}"
    return ""


@formula(kernel=("default",), requires=_sizes_fit)
def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Cotangents of $v$ and $g$, given that of $w$: $g (G - u <G u>) / |v|$, and $<G u>$.

    Returns:
        The shapes of $v$ and $g$.

    References:
        ATen _weight_norm_interface_backward; Salimans, Kingma, Weight Normalization, arXiv:1602.07868, eq. 3.
    """
    w = _Weight(saved_v, saved_norms, dim)
    G, g = widened(grad_w, saved_g)
    of_g = w.sum(G * w.u)
    of_v = g * (G - w.u * of_g) / w.norm
    return of_v.to(saved_v.dtype).contiguous(), of_g.to(saved_g.dtype).contiguous()


@weight_norm_backward.impl("default")
def _(grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int) -> tuple[Tensor, ...]:
    if not saved_v.numel():  # PyTorch's kernel would crash
        return torch.zeros_like(saved_v).contiguous(), torch.zeros_like(saved_g).contiguous()
    found = torch.ops.aten._weight_norm_interface_backward(
        *(x.contiguous() for x in (grad_w, saved_v, saved_g, saved_norms)), dim
    )
    return tuple(f.contiguous() for f in found)


@formula
def weight_norm_backward_jvp(
    grad_w: Tensor,
    grad_w_t: Tensor | None,
    saved_v: Tensor,
    saved_v_t: Tensor | None,
    saved_g: Tensor,
    saved_g_t: Tensor | None,
    saved_norms: Tensor,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """Tangents of the two gradients; without ``grad_w_t`` also cotangents of $v$ and $g$, given those of the gradients.

    Returns:
        The shapes of $v$ and $g$.

    References:
        The derivative of `weight_norm_backward`; ATen _weight_norm_differentiable_backward treats the norms as
        constants.
    """
    w = _Weight(saved_v, saved_norms, dim)
    G, G_t, v_t, g, g_t = widened(grad_w, grad_w_t, saved_v_t, saved_g, saved_g_t)
    G_u = w.sum(G * w.u)
    A = (G - w.u * G_u) / w.norm
    of_v, of_g = torch.zeros_like(w.u), torch.zeros_like(G_u)
    if G_t is not None:
        of_g = w.sum(G_t * w.u)
        of_v = g * (G_t - w.u * of_g) / w.norm
    if v_t is not None:
        u_t = w.along(v_t)
        along = w.sum(G * u_t)
        of_g = of_g + along
        of_v = of_v - g * (w.sum(w.u * v_t) * A + u_t * G_u + w.u * along) / w.norm
    if g_t is not None:
        of_v = of_v + g_t * A
    return of_v.to(saved_v.dtype), of_g.to(saved_g.dtype)


def _double_vjp(
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_w: Tensor,
    saved_v: Tensor,
    saved_g: Tensor,
    saved_norms: Tensor,
    dim: int,
) -> tuple[Tensor, ...]:
    of_v, of_g = weight_norm_backward_jvp(grad_w, None, saved_v, grad_result0, saved_g, grad_result1, saved_norms, dim)
    return weight_norm_jvp(saved_v, grad_result0, saved_g, grad_result1, saved_norms, dim), of_v, of_g


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::_weight_norm_interface",
    vjp={("v", "g"): weight_norm_backward.bind(grad_w="grad_result0", saved_v="v", saved_g="g", saved_norms="result1")},
    jvp={"result0": weight_norm_jvp.bind(saved_norms="result1")},
    not_differentiable="result1",
    improves="values",
    source="ATen _weight_norm_interface_backward; Salimans, Kingma, Weight Normalization, arXiv:1602.07868",
)
rule(
    "aten::_weight_norm_interface_backward",
    vjp={("grad_w", "saved_v", "saved_g"): _double_vjp, "saved_norms": lambda: None},
    jvp={("result0", "result1"): weight_norm_backward_jvp},
    improves="missing",
    source="ATen has none; Salimans, Kingma, Weight Normalization, arXiv:1602.07868",
)
