package registry

import "testing"

// The vectors of the reference implementation: key 00 01 ... 0f, and texts of the bytes
// 00, 00 01, and so on.
func TestSipHash(t *testing.T) {
	var key [16]byte
	for i := range key {
		key[i] = byte(i)
	}
	k := newSipKey(key)
	text := make([]byte, 15)
	for i := range text {
		text[i] = byte(i)
	}
	for n, want := range map[int]uint64{0: 0x726fdb47dd0e0e31, 1: 0x74f839c593dc67fd, 7: 0xab0200f58b01d137, 8: 0x93f5f5799a932462, 15: 0xa129ca6149be45e5} {
		if got := k.sum(string(text[:n])); got != want {
			t.Errorf("sum of %d bytes is %x, want %x", n, got, want)
		}
	}
}
