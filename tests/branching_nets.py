"""Models with branches and loops on the values of tensors, as their authors wrote them."""

import functools

import torch
from torch import nn


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Assigning(TwoLayers):
    """Branches that assign tensors, numbers, and variables that are not read afterward."""

    def forward(self, x):
        count = x.shape[0]
        if x.sum() > 0:
            y = self.a(x)
            scale = 2
        elif x.mean() < -2:
            hidden = x.mean(0, keepdim=True)
            y = x * count + hidden
            scale = 3
        else:
            hidden = x * 2
            y = self.b(hidden) - 1
            scale = 2.5
        return y * scale


class Unchanged(TwoLayers):
    """An ``if`` without ``else``."""

    def forward(self, x):
        y = self.a(x)
        if y.mean() > 0:
            y = self.b(y)
        return y, x


class EarlyReturn(TwoLayers):
    def forward(self, x):
        if x.sum() > 0:
            return self.a(x)
        y = self.b(x)
        if y.mean() > 0 and x.amax() < 3:
            y = y + 1
        return y


class ReturnInEach(TwoLayers):
    def forward(self, x):
        y = x + 1
        if x.sum() > 0:
            if x.amax() > 2:
                return {"y": self.a(x), "x": x}
        elif x.amin() < -2:
            return {"y": self.b(y), "x": x * 2}
        y = y * 2
        if x.mean() > 10:
            y = y - 100
        return {"y": y, "x": x}


class Nested(TwoLayers):
    def forward(self, x, y):
        if x.sum() > 0:
            if y.sum() > 0:
                z = self.a(x) + y
            else:
                z = self.b(x) - y
            z = z * 2
        else:
            z = x
            if y.amax() > 1:
                z = z + y
        return z


class Looping(TwoLayers):
    """A loop whose test and counter become tensors."""

    def forward(self, x):
        steps = 0
        while x.norm() > 1 and steps < 10:
            x = self.a(x) * 0.3
            steps += 1
        return x * steps


class LoopOfPairs(nn.Module):
    """A loop that carries a tuple, and a variable that changes only after the first iteration."""

    def forward(self, x):
        pair, last, i = (x, x * 2), 0, 0
        while pair[0].sum() < 100:
            last = i
            i = i + 1
            pair = (pair[1], pair[0].abs() + pair[1].abs() + 1)
        return pair[0] + last, pair[1] * i


class BranchInLoop(nn.Module):
    """The rule of Collatz, on the sum of the input."""

    def forward(self, x):
        n = x.sum().round().abs() + 1
        steps = torch.zeros(())
        while n > 1:
            if n % 2 == 0:
                n = n / 2
            else:
                n = 3 * n + 1
            steps = steps + 1
        return x + steps


class LoopInBranch(TwoLayers):
    def forward(self, x):
        if x.mean() > 0:
            while x.amax() > 1:
                x = x / 2
        else:
            x = self.a(x)
        return self.b(x)


class Expressions(TwoLayers):
    """Conditional expressions, ``and``, ``or``, ``not`` and chains of comparisons."""

    def forward(self, x):
        positive = x.mean() > 0
        y = self.a(x) if positive else self.b(x)
        small = not x.abs().amax() > 2
        z = y + 1 if small or positive else y - 1
        middle = 2 if -0.5 < x.mean() < 0.5 else 1
        either = (x.sum() > 3) or positive
        return z * middle, y * either


class PlainAndTraced(TwoLayers):
    """Plain operands decide before traced ones are evaluated."""

    def forward(self, x, mask=None):
        if mask is not None and mask.any() or not self.training and x.shape[1] == 5 and x.undefined():
            x = x.masked_fill(mask, 0.0) if mask is not None else x
        if self.training or x.sum() > 0:
            return self.a(x)
        return self.b(x)


class ReadNumbers(TwoLayers):
    """Conditions on Python numbers that were read from tensors."""

    def forward(self, x):
        total = x.sum().item()
        count = int((x > 0).sum())
        if total > 1:
            total += 1
            return self.a(x) * total
        if bool((x < -3).any()):
            return self.b(x) - float(x.amax())
        return x * count if count > 2 else x


class ForLoop(nn.Module):
    """Branches in a loop over modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        outputs = []
        for i, layer in enumerate(self.layers):
            y = layer(x)
            if y.mean() > x.mean():
                x = y + i
            elif i == 1:
                x = y - x
            outputs.append(x)
        return torch.stack(outputs)


def scale_by_sign(x, factor=2.0, *, shift=1.0):
    if x.sum() > 0:
        return x * factor
    return x * factor - shift


class Helpers(TwoLayers):
    """Functions, methods, inner functions with closures and defaults, static methods."""

    def select(self, x, y):
        if x.mean() > y.mean():
            return x
        return y

    @staticmethod
    def clip(x, limit=1.5):
        if x.abs().amax() > limit:
            x = x / x.abs().amax()
        return x

    def forward(self, x):
        offset = x.mean() * 0.1

        def shifted(y, sign=-1):
            if y.amin() < 0:
                y = y + sign * offset
            return y

        return scale_by_sign(self.clip(shifted(self.select(self.a(x), self.b(x)))), shift=0.5)


class Base(TwoLayers):
    def forward(self, x):
        return self.a(x)


class Derived(Base):
    """``super()`` and private names in branches."""

    def __init__(self):
        super().__init__()
        self.__gain = 3.0

    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x) * self.__gain
        y = super().forward(-x)
        return y if y.mean() > 0 else y * self.__gain


def doubled(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs) * 2

    return call


class Decorated(TwoLayers):
    @doubled
    def forward(self, x):
        if x.sum() > 0:
            return self.a(x)
        return self.b(x)


class Structures(TwoLayers):
    """Branches that assign tuples, dicts and None."""

    def forward(self, x):
        if x.sum() > 0:
            pair, cache, named = (self.a(x), 1), None, {"h": x}
        else:
            pair, cache, named = (self.b(x), 2), None, {"h": -x}
        assert cache is None
        return pair[0] * pair[1] + named["h"]


class Sizes(TwoLayers):
    """Branches on sizes stay branches of Python, and branches of a condition read sizes."""

    def forward(self, x, y):
        rows, others = x.shape[0], y.shape[0]
        if rows > 1000:
            x = x * 2
        if x.sum() > 0:
            return x * rows + others
        return torch.zeros(rows, 4) + y.sum() / others


class WithBlock(TwoLayers):
    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
            if y.sum() > 0:
                return x * 2
            return self.b(x)


class InPlaceOnCopy(nn.Module):
    """Writes to tensors that the branch itself made."""

    def forward(self, x):
        if x.sum() > 0:
            y = x.clone()
            y += 1
            y[:, 0] = 0
        else:
            y = x * 2
        return y


class Normalized(nn.Module):
    """Layers with buffers in both branches."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.b = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.register_buffer("limit", torch.tensor(0.25))
        self.table = torch.arange(4.0)

    def forward(self, x):
        if (x.mean(1) > self.limit).all():
            return self.a(x) + self.table
        return self.b(x) - self.table


class LoopTest(nn.Module):
    """A loop whose test assigns a variable."""

    def forward(self, x):
        while (largest := x.abs().amax()) > 1:
            x = x / largest * 0.9
        return x + largest


class Halting(TwoLayers):
    """Adaptive computation: each row adds steps until its halting probabilities sum to 1."""

    def forward(self, x):
        halted, total, steps = torch.zeros(x.shape[0]), torch.zeros_like(x), 0
        while (halted < 0.99).any() and steps < 8:
            p = torch.minimum(torch.sigmoid(self.a(x)[:, 0]), 1 - halted)
            total = total + p[:, None] * x
            halted = halted + p
            x = torch.tanh(self.b(x))
            steps += 1
        return total, halted


class Recurrent(nn.Module):
    """Layers of PyTorch that change attributes of their own in a branch."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.lstm(x[None])[0][0]
        return x * 2


class ExitByBreak(nn.Module):
    """A loop over layers that ends when the values are small, with code after it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        used = 0
        for i, layer in enumerate(self.layers):
            if x.abs().amax() < 1:
                y = x * 3
                break
            x = layer(x)
            used = i + 1
            if i == 0 and x.amin() > 0.2:
                continue
            x = x * 0.9
        else:
            y = x - 1
        return self.head(y) * used


class ExitByReturn(ExitByBreak):
    """Early exits from a loop over layers."""

    def forward(self, x):
        total = x * 0
        for layer in self.layers:
            x = layer(x)
            if x.std() < 0.4:
                return self.head(x) * 2
            if x.amax() > 3:
                break
            total = total + x
        return self.head(total)


class NestedLoops(nn.Module):
    def forward(self, x):
        total = x * 0
        for i in range(3):
            for row in x.unbind(1):
                if row.sum() > 1:
                    break
                total = total + row.mean() + i
            if total.amax() > 4:
                break
        return total
