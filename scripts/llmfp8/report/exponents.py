"""Histograms of the exponents of tensors: which steps the page keeps, and their form on it."""
import base64
import math
import struct

STEPS = 16           # at most, of a page
MOST_BYTES = 900_000   # of a run's histograms
OCTAVES, LEVELS = 40, 65534   # a share of 2^-40 has level 1, one of 1 the largest; 0: no value


class Exponents:
    """The records of at most STEPS steps: some at equal distances, and the last one."""

    def __init__(self):
        self.kept, self.last = [], None   # (step, {tensor: record})
        self.stride, self.seen = 1, 0

    def add(self, step, tensors):
        self.last = (step, {tensor["name"]: tensor for tensor in tensors})
        if self.seen % self.stride == 0:
            if len(self.kept) == STEPS - 1:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
            if self.seen % self.stride == 0:
                self.kept.append(self.last)
        self.seen += 1

    def cut(self, step):
        """Forgets the records after `step`."""
        self.kept = [entry for entry in self.kept if entry[0] <= step]
        if self.last and self.last[0] > step:
            self.last = self.kept[-1] if self.kept else None

    def steps(self):
        """[(step, {tensor: record})] in the order of steps."""
        if self.last and (not self.kept or self.kept[-1][0] != self.last[0]):
            return [*self.kept, self.last]
        return list(self.kept)


def level(count, values):
    if count <= 0:
        return 0
    return 1 + max(0, round(LEVELS * (1 + math.log2(count / values) / OCTAVES)))


def page_data(exponents, order, short):
    """Shares of the values of each tensor in `order` as levels of 16 bits, by step, tensor and exponent; the last two
    of a tensor are zeros and values that are not finite. None without records."""
    steps = exponents.steps()
    found = [tensor for _, tensors in steps for tensor in tensors.values() if tensor["counts"]]
    if not found:
        return None
    low = min(tensor["first"] for tensor in found)
    bins = max(tensor["first"] + len(tensor["counts"]) for tensor in found) - low
    fits = max(1, MOST_BYTES // (2 * len(order) * (bins + 2)))
    while len(steps) > fits:   # the last step stays
        steps = steps[:-1][::2][:fits - 1] + steps[-1:]
    levels = bytearray()
    for _, tensors in steps:
        for name in order:
            row, tensor = [0] * (bins + 2), tensors.get(name)
            if tensor:
                values = sum(tensor["counts"]) + tensor["zeros"] + tensor["nonfinite"]
                begin = tensor["first"] - low if tensor["counts"] else 0
                row[begin:begin + len(tensor["counts"])] = [level(count, values) for count in tensor["counts"]]
                row[bins:] = [level(tensor[field], values) for field in ("zeros", "nonfinite")]
            levels += struct.pack(f"<{bins + 2}H", *row)
    def numbers(field):
        return [[short(number(tensors.get(name, {}).get(field))) for name in order] for _, tensors in steps]
    return {"low": low, "bins": bins, "steps": [step for step, _ in steps], "scales": numbers("scale"),
            "amaxes": numbers("amax"), "data": base64.b64encode(bytes(levels)).decode()}


def number(value):
    return math.nan if value is None else float(value)
