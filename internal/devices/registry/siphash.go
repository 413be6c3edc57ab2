package registry

import (
	"encoding/binary"
	"math/bits"
)

// sipKey keys the hashes of the roster, so that only holders of the fleet's secret can
// find ids that collide.
type sipKey struct{ k0, k1 uint64 }

func newSipKey(key [16]byte) sipKey {
	return sipKey{binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:])}
}

// sum returns SipHash-2-4 (Aumasson and Bernstein, 2012) of the text.
func (k sipKey) sum(text string) uint64 {
	v0, v1 := k.k0^0x736f6d6570736575, k.k1^0x646f72616e646f6d
	v2, v3 := k.k0^0x6c7967656e657261, k.k1^0x7465646279746573
	round := func() {
		v0 += v1
		v1 = bits.RotateLeft64(v1, 13) ^ v0
		v0 = bits.RotateLeft64(v0, 32)
		v2 += v3
		v3 = bits.RotateLeft64(v3, 16) ^ v2
		v0 += v3
		v3 = bits.RotateLeft64(v3, 21) ^ v0
		v2 += v1
		v1 = bits.RotateLeft64(v1, 17) ^ v2
		v2 = bits.RotateLeft64(v2, 32)
	}
	last := uint64(len(text)) << 56
	i := 0
	for ; i+8 <= len(text); i += 8 {
		m := uint64(text[i]) | uint64(text[i+1])<<8 | uint64(text[i+2])<<16 | uint64(text[i+3])<<24 |
			uint64(text[i+4])<<32 | uint64(text[i+5])<<40 | uint64(text[i+6])<<48 | uint64(text[i+7])<<56
		v3 ^= m
		round()
		round()
		v0 ^= m
	}
	for j := 0; i+j < len(text); j++ {
		last |= uint64(text[i+j]) << (8 * j)
	}
	v3 ^= last
	round()
	round()
	v0 ^= last
	v2 ^= 0xff
	for range 4 {
		round()
	}
	return v0 ^ v1 ^ v2 ^ v3
}
