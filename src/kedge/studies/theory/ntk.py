"""The neural tangent kernel of a two-layer ReLU network, for inputs x and for pairs [c, x - c].

The network is ``f(a) = sum_r s_r relu(w_r . a) / sqrt(width)`` with standard normal ``w_r`` that are trained and signs
``s_r`` that are not, so the kernel is that of the first layer alone, as in the paper. The paper takes every input to
have unit norm. Pairs cannot all have it, so the kernel here is the homogeneous one, of which the paper's is the case on
the sphere. Inputs are rows: N or M of them, of D values; an anchor c that all rows share is (D,).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kedge.checks import between, one_of, shape_of
from kedge.errors import InputError

FORMS = ("paper", "first order")


def on_sphere(dot: Tensor) -> Tensor:
    """The paper's kernel of two unit vectors with the given dot product; NaN where there are no such vectors."""
    return dot * (math.pi - dot.acos()) / (2 * math.pi)


def h_ntk(a: Tensor, b: Tensor) -> Tensor:
    """The kernel (N, M) between rows of any norm, (N, D) and (M, D): ``a . b (pi - angle) / 2 pi``.

    Example:
        >>> h_ntk(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[3., 0.]])
    """
    apart, together = _halves(a, b)
    return (a @ b.T) * torch.atan2(together, apart) / math.pi  # (N, M)


def initial_kernel(a: Tensor, b: Tensor) -> Tensor:
    """The covariance (N, M) of the untrained network's outputs over its random weights."""
    apart, together = _halves(a, b)
    norms = torch.outer(a.norm(dim=1), b.norm(dim=1))  # (N, M)
    sine = apart * together / 2
    return norms * sine / (2 * math.pi) + h_ntk(a, b)


def encode(x: Tensor, anchors: Tensor) -> Tensor:
    """The pairs [c, x - c], (N, 2 D), of inputs (N, D) with one anchor for all, (D,), or one for each, (N, D)."""
    _check_rows("x", x)
    if anchors.shape not in (x.shape, x.shape[1:]):
        raise InputError(
            f"anchors must be one row for all, {tuple(x.shape[1:])}, or one for each row of x, {tuple(x.shape)}; got "
            f"{shape_of(anchors)}: pick them out of the training inputs"
        )
    c = anchors.expand_as(x)
    return torch.cat([c, x - c], dim=1)  # (N, 2 D)


def anchored_kernel(x: Tensor, z: Tensor, c: Tensor) -> Tensor:
    """The exact kernel of the pairs [c, x - c] and [c, z - c], for inputs of any norm."""
    _check_anchor(x, c)
    return h_ntk(encode(x, c), encode(z, c))


def dot_shift(x: Tensor, z: Tensor, c: Tensor) -> Tensor:
    """The dot product of the inputs less that of their pairs: ``c . (x + z - 2 c)``, (N, M)."""
    _check_anchor(x, c)
    return (x @ c)[:, None] + z @ c - 2 * c @ c  # (N, M)


def gamma(x: Tensor, z: Tensor, c: Tensor, form: str = "paper") -> Tensor:
    r"""The change of the kernel by the anchor for inputs on the sphere, approximately: ``K_anc = K - gamma``.

    With ``u = x . z`` and ``d = c . (x + z - 2 c)``, both forms share the first term ``d (pi - arccos u) / 2 pi``.

    ``"paper"`` adds ``d t / (2 pi sqrt(1 - t^2))`` with ``t = u - d`` (``c . v`` for the ``c`` that is printed there),
    which supposes that the pairs have unit norm like the inputs. But if x, z, [c, x - c] and [c, z - c] all have unit
    norm, then ``d = 0`` and gamma is zero. It has no value, NaN, where ``t`` is not a cosine.

    ``"first order"`` accounts for the norms of the pairs, whose squares are ``1 - 2 c . (x - c)``: to first order in c
    the cosine of their angle is ``u - (1 - u) d``, and the second term is ``d u sqrt((1 - u) / (1 + u)) / 2 pi``.

    Both grow without bound towards opposite points, and the paper's towards equal ones.

    Example:
        >>> x, c = torch.tensor([[1.0, 0.0]]), torch.tensor([0.1, 0.0])
        >>> gamma(x, x, c, "first order")  # the kernel falls from 0.5 to (0.1^2 + 0.9^2) / 2
        tensor([[0.0900]])
    """
    one_of("form", form, FORMS)
    _check_unit("x", x)
    _check_unit("z", z)
    apart, together = _halves(x, z)  # squared: 2 - 2 u and 2 + 2 u
    u, d = x @ z.T, dot_shift(x, z, c)
    if form == "paper":
        t = u - d
        second = d * t / (1 - t.square()).sqrt()
        second = second.masked_fill(t.abs() >= 1, math.nan)
    else:
        second = d * u * apart / together
    return (2 * d * torch.atan2(together, apart) + second) / (2 * math.pi)


def approximate_anchored_kernel(x: Tensor, z: Tensor, c: Tensor, form: str = "paper") -> Tensor:
    """The approximation ``K - gamma`` of the anchored kernel.

    The error of the paper's form is of the order of the anchor's length, that of the first-order form of its square.
    """
    return h_ntk(x, z) - gamma(x, z, c, form)


def dual_weights(kernel: Tensor, targets: Tensor, *, ridge: float = 0.0) -> Tensor:
    """The solution w of ``(K + ridge I) w = targets`` for targets (N,) or (N, C)."""
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or len(targets) != len(kernel):
        raise InputError(
            f"kernel must be (N, N) for N targets; got {shape_of(kernel)} and {len(targets)} targets: pass that of the "
            "training inputs with themselves"
        )
    between("ridge", ridge, 0, math.inf)
    identity = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    factor, failed = torch.linalg.cholesky_ex(kernel + ridge * identity)
    if int(failed):
        raise InputError(
            "kernel must be positive definite; it is not, because some training inputs are parallel or nearly so: drop "
            "repeated inputs, or pass a ridge such as 1e-6"
        )
    columns = targets if targets.ndim == 2 else targets[:, None]
    return torch.cholesky_solve(columns, factor).reshape(targets.shape)


def predict(
    kernel_train: Tensor,
    kernel_test: Tensor,
    y: Tensor,
    *,
    ridge: float = 0.0,
    initial_train: Tensor | None = None,
    initial_test: Tensor | None = None,
) -> Tensor:
    """The infinitely wide network after training: ``f_inf = f_0(test) - K_test K_train^-1 (f_0(train) - y)``.

    Args:
        kernel_train: Kernel of the training inputs, (N, N).
        kernel_test: Kernel between test and training inputs, (T, N).
        y: Targets, (N,) or (N, C).
        ridge: Added to the diagonal of ``kernel_train``.
        initial_train: Outputs of the untrained network, shaped as ``y``; zero by default, the mean over networks.
        initial_test: Likewise on the test inputs.

    Example:
        >>> x = torch.eye(2)
        >>> predict(h_ntk(x, x), h_ntk(x, x), torch.tensor([1.0, -1.0]))
        tensor([ 1., -1.])
    """
    if (initial_train is None) != (initial_test is None):
        raise InputError("initial_train and initial_test belong together; got only one of them: pass both or neither")
    if initial_train is None or initial_test is None:
        return kernel_test @ dual_weights(kernel_train, y, ridge=ridge)
    return initial_test - kernel_test @ dual_weights(kernel_train, initial_train - y, ridge=ridge)


def spectrum(kernel: Tensor) -> Tensor:
    """The eigenvalues of a symmetric kernel matrix, largest first, (N,)."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(kernel)
    return eigenvalues.flip(0)


def effective_rank(eigenvalues: Tensor) -> float:
    """The number of directions that share the trace: ``(sum l)^2 / sum l^2``, from 1 to N."""
    return float(eigenvalues.sum().square() / eigenvalues.square().sum())


def _halves(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Distance and sum of the directions, 2 sin and 2 cos of half the angle: unlike arccos, exact at small angles."""
    _check_rows("a", a)
    _check_rows("b", b)
    if a.shape[1] != b.shape[1]:
        raise InputError(f"a and b must have rows of one length; got {shape_of(a)} and {shape_of(b)}: encode both")
    one, other = normalize(a, dim=1), normalize(b, dim=1)
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(one, other, compute_mode=exact), torch.cdist(one, -other, compute_mode=exact)


def _check_rows(name: str, value: Tensor) -> None:
    if value.ndim != 2:
        raise InputError(f"{name} must be (N, D), one input a row; got {shape_of(value)}: for images pass x.flatten(1)")


def _check_anchor(x: Tensor, c: Tensor) -> None:
    _check_rows("x", x)
    if c.shape != x.shape[1:]:
        raise InputError(
            f"c must be one anchor, {tuple(x.shape[1:])}; got {shape_of(c)}: for an anchor to each row, pass the "
            "result of encode to h_ntk"
        )


def _check_unit(name: str, value: Tensor) -> None:
    _check_rows(name, value)
    norms = value.norm(dim=1)
    if bool(((norms - 1).abs() > 1e-5).any()):
        raise InputError(
            f"{name} must have rows of unit norm; got norms from {float(norms.min()):.3g} to {float(norms.max()):.3g}: "
            "pass torch.nn.functional.normalize(x), or use anchored_kernel, which takes any norm"
        )
