"""Makes frames.bin, the recording the simulated devices speak.

The voice is synthesised here: a pulse train with a moving pitch through three formant filters, hisses between the
syllables, pauses between the phrases. libopus encodes it as the firmware does: 16 kHz mono, 60 ms, VBR, DTX. No
recording of a person and nobody else's sound is in it.

    python3 make.py [path of libopus.so.0] > frames.bin

frames.bin: u16 number of speech frames, u16 number of silence frames, then every frame as u16 length and packet; all
numbers big-endian. The silence frames are one period of what the encoder sends while nobody speaks.
"""

import ctypes
import math
import random
import struct
import sys

RATE, FRAME = 16000, 960
VOIP, SET_BITRATE, SET_VBR, SET_COMPLEXITY, SET_DTX = 2048, 4002, 4006, 4010, 4016
VOWELS = [(730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240), (500, 1500, 2500)]


class Formant:
    """A two-pole resonator whose centre may move."""

    def __init__(self):
        self.a = self.b = 0.0

    def step(self, x, hertz, width):
        r = math.exp(-math.pi * width / RATE)
        y = (1 - r) * x + 2 * r * math.cos(2 * math.pi * hertz / RATE) * self.a - r * r * self.b
        self.a, self.b = y, self.a
        return y


def voice(seconds):
    rng = random.Random(60)
    out, phase, at = [], 0.0, list(VOWELS[0])
    filters = [Formant() for _ in at]
    while len(out) < seconds * RATE:
        for _ in range(rng.randint(5, 9)):  # syllables of one phrase
            target, pitch = rng.choice(VOWELS), rng.uniform(95, 165)
            for _ in range(rng.randint(600, 1400)):  # hiss
                out.append(rng.gauss(0, 0.02))
            n = rng.randint(2200, 4200)
            for i in range(n):
                at = [a + (t - a) * 0.002 for a, t in zip(at, target)]
                phase += (pitch * (1 + 0.15 * math.sin(math.pi * i / n))) / RATE
                pulse = 1.0 if phase >= 1 else rng.gauss(0, 0.01)
                phase %= 1
                y = sum(f.step(pulse, h, w) for f, h, w in zip(filters, at, (80, 110, 160)))
                out.append(y * 4 * math.sin(math.pi * i / n) ** 0.5)
        out.extend(rng.gauss(0, 0.0002) for _ in range(rng.randint(6000, 16000)))  # pause
    return out[: seconds * RATE]


def encode(lib, samples):
    fault = ctypes.c_int()
    lib.opus_encoder_create.restype = ctypes.c_void_p
    encoder = ctypes.c_void_p(lib.opus_encoder_create(RATE, 1, VOIP, ctypes.byref(fault)))
    for request, value in ((SET_BITRATE, 16000), (SET_VBR, 1), (SET_COMPLEXITY, 5), (SET_DTX, 1)):
        lib.opus_encoder_ctl(encoder, request, ctypes.c_int(value))
    room, packets = ctypes.create_string_buffer(1500), []
    for i in range(0, len(samples) - FRAME + 1, FRAME):
        pcm = (ctypes.c_int16 * FRAME)(*(max(-32768, min(32767, int(s * 32767))) for s in samples[i : i + FRAME]))
        size = lib.opus_encode(encoder, pcm, FRAME, room, len(room))
        packets.append(room.raw[:size])
    return packets


def main():
    lib = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "libopus.so.0")
    seconds, rng = 12, random.Random(61)
    packets = encode(lib, voice(seconds) + [rng.gauss(0, 0.0002) for _ in range(6 * RATE)])
    speech, quiet = packets[: seconds * RATE // FRAME], packets[seconds * RATE // FRAME :]
    # From one refresh to the next, once the encoder has settled.
    long = [i for i, p in enumerate(quiet) if len(p) > 2 and i > 20]
    silence = quiet[long[0] : long[1]]
    sys.stdout.buffer.write(struct.pack(">HH", len(speech), len(silence)))
    for p in speech + silence:
        sys.stdout.buffer.write(struct.pack(">H", len(p)) + p)


main()
