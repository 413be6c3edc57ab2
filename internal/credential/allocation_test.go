//go:build !race

// The race detector allocates, so this budget is held without it.

package credential

import "testing"

// A hop is signed and verified without a hash that is built anew.
func TestHopSignatureAllocations(t *testing.T) {
	m := mint(t, secret)
	body := string(make([]byte, 1000))
	signature := m.HopSignature("d", "call", body)
	if n := testing.AllocsPerRun(500, func() { signature = m.HopSignature("d", "call", body) }); n > 1 {
		t.Errorf("a signature takes %.0f allocations, want 1, its text", n)
	}
	if n := testing.AllocsPerRun(500, func() {
		if !m.IsHop(signature, "d", "call", body) {
			t.Error("its signature is not valid")
		}
	}); n > 0 {
		t.Errorf("a check takes %.0f allocations, want none", n)
	}
}
