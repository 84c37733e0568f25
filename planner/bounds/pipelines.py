"""Lower bounds on the step of a pipeline, whatever its cuts, from loads.

Blocks are taken for divisible, among devices and among recompute policies. Device d of p holds h_d
micro-batches of whatever it has. Let it have the part y_dkq of the blocks of kind k under option q
(a recompute policy):

    Σ_kq y_dkq cost_kq <= t_d,    Σ_kq y_dkq bytes_kq(h_d) <= room,    Σ_dq y_dkq = 1 for every k

with t_d its seconds per micro-batch. For weights π_k, and any ν >= 0 (seconds per byte), no device
has more of Σ π y than

    cap_d(t)  =  min over ν of  α_dν (t + ν room)
    α_dν      =  max over k of  π_k / min_q (cost_kq + ν bytes_kq(h_d))

(the dual of its two constraints), and a step T is possible only if  Σ_d cap_d(t_d) >= Σ_k π_k.
The schedule bounds the t_d: e_d + m t_d <= T, where e_d passes before the device's first compute;
and where devices wait for the fraction φ of a pass of each device before them (`filled`),

    m t_d + φ Σ_{i<d} t_i  <=  T          added up with weights so that every t_d counts alike:

    Σ_d t_d  <=  θ T,     θ = (1 - (1 - φ/m)^p) / φ

of which a part c is taken off:  Σ_k π_k  <=  c θ T + Σ_d max {cap_d(t) - c t : 0 <= t <= T/m}
for every c >= 0. The right side rises nowhere faster than at the left, so that no step of Newton's
method passes the least T, wherever it stops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.stages import Floats

STEPS = 12  # of Newton's method
FEW = 10  # options of a block whose prices are compared one by one
PARTS = (0.5, 0.8, 1.0)  # c, of what a device without need of memory takes a second
GRID = 2.0 ** np.arange(-5, 6)  # ν, of the seconds that all blocks take over the bytes there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All blocks of each kind under each option, (k, q): seconds per micro-batch, bytes, and bytes
    per micro-batch in flight, of which one block is `block_part`; `room` of a device."""

    cost_s: Floats
    static_bytes: Floats
    active_bytes: Floats
    block_part: Floats
    room: float

    def bytes_of(self, held: float) -> Floats:
        """(k, q): bytes with so many micro-batches in flight; inf where no block fits."""
        used = self.static_bytes + held * self.active_bytes
        return np.where(self.block_part * used <= self.room, used, np.inf)

    @property
    def least_s(self) -> Floats:
        """(k,): seconds of the fastest option."""
        return np.asarray(self.cost_s.min(axis=1))

    def prices(self, held: float) -> Floats:
        """Seconds per byte (n,) worth a try: of few options those at which one gives way to
        another, too."""
        tried = [np.zeros(1), GRID * float(self.least_s.sum()) / self.room]
        if self.cost_s.shape[1] <= FEW:
            freed = self.active_bytes[:, None, :] - self.active_bytes[:, :, None]
            more = self.cost_s[:, :, None] - self.cost_s[:, None, :]
            pays = (freed > 0) & (more > 0)
            tried.append(more[pays] / (held * freed[pays]))
        return np.unique(np.concatenate(tried))


def shared_s(work: Work, held: float, devices: int) -> tuple[float, float]:
    """Least seconds per micro-batch of so many devices that hold and compute the same, and the
    price of a byte that proves it; infinite where the blocks don't fit."""
    used = work.bytes_of(held)
    if used.min(axis=1).sum() > devices * work.room:
        return np.inf, 0.0
    prices = work.prices(held)
    bounds = _least(work, used, prices).sum(axis=1) / devices - prices * work.room
    best = int(bounds.argmax())
    return float(bounds[best]), float(prices[best])


def _least(work: Work, used: Floats, prices: Floats) -> Floats:
    """(n, k): least seconds with bytes at each price."""
    fits = np.isfinite(used)
    costs = work.cost_s + prices[:, None, None] * np.where(fits, used, 0.0)
    return np.asarray(np.where(fits, costs, np.inf).min(axis=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The lines α t + β of the caps of devices, (d, n), and the sum that all devices must have,
    Σ π; `usual` is α without need of memory."""

    alpha: Floats
    beta: Floats
    wanted: float
    usual: float


def devices_of(work: Work, held: Floats, price: float) -> Devices:
    """The caps of devices that hold so many micro-batches (d,), with π at one price of bytes."""
    middle = _least(work, work.bytes_of(float(held.mean())), np.array([price]))[0]
    pi = np.where(np.isfinite(middle), middle, work.least_s)
    alpha, beta = {}, {}
    for h in set(held.tolist()):
        prices = work.prices(h)
        least = _least(work, work.bytes_of(h), prices)
        alpha[h] = (pi / np.maximum(least, 1e-30)).max(axis=1)
        beta[h] = alpha[h] * prices * work.room
    at = np.arange(max(map(len, alpha.values())))

    def rows(of: dict[float, Floats]) -> Floats:  # the last line fills up
        return np.stack([of[h][np.minimum(at, len(of[h]) - 1)] for h in held.tolist()])

    usual = float(pi.sum() / work.least_s.sum())
    return Devices(alpha=rows(alpha), beta=rows(beta), wanted=float(pi.sum()), usual=usual)


def balanced_s(devices: Devices, m: int, before_s: Floats, start_s: float) -> float:
    """Least T with e_d + m t_d <= T, from `start_s` on."""
    return _newton(devices, m, (0.0, 0.0, 0.0), before_s, start_s)


def filled_s(devices: Devices, m: int, theta: float, less_s: float, start_s: float) -> float:
    """Least T where also Σ t_d <= θT - `less_s`."""
    nothing, step = np.zeros(len(devices.alpha)), start_s
    for part in PARTS:
        step = _newton(devices, m, (part * devices.usual, theta, less_s), nothing, step)
    return step


def theta(m: int, devices: int, phi: float) -> float:
    """θ of devices that wait for the part φ of a pass of each one before them."""
    return (1 - (1 - phi / m) ** devices) / phi


def _newton(
    devices: Devices, m: int, together: tuple[float, float, float], before_s: Floats, start_s: float
) -> float:
    """Least T from `start_s` on that the devices can do; `together` are c, θ and seconds off θT."""
    c, theta, less_s = together
    slopes, starts = devices.alpha - c, devices.beta
    step, highest = start_s, _highest(slopes, starts)
    rows = np.arange(len(slopes))
    for _ in range(STEPS):
        most = np.maximum(step - before_s, 0.0) / m
        lines = slopes * most[:, None] + starts
        pick = lines.argmin(axis=1)
        rising = slopes[rows, pick] > 0
        had = np.where(rising, np.minimum(lines[rows, pick], highest), highest)
        got = c * (theta * step - less_s) + float(had.sum())
        if got >= devices.wanted * (1 - 1e-9):
            return step
        # no less than the slope anywhere further right: those that can't start yet are taken in
        slope = c * theta + float(slopes[rows, pick][rising].sum()) / m
        if slope <= 0:
            return np.inf
        step += (devices.wanted - got) / slope
    return step


def _highest(slopes: Floats, starts: Floats) -> Floats:
    """(d,): the highest point of the least of each device's lines; inf where all rise."""
    a1, a2 = slopes[:, :, None], slopes[:, None, :]
    b1, b2 = starts[:, :, None], starts[:, None, :]
    crossing = (a1 >= 0) & (a2 < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.maximum((b2 - b1) / (a1 - a2), 0.0)
        value = np.where(at > 0, a1 * at + b1, np.minimum(b1, b2))
    highest: Floats = np.where(crossing, value, np.inf).min(axis=(1, 2))
    # all fall: highest at 0
    return np.where((slopes < 0).all(axis=1), starts.min(axis=1), highest)
