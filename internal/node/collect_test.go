package node

import "testing"

// Bytes of tool lists do not let the heap grow by as many again; a fleet whose
// lists are few is collected as the runtime does it.
func TestHeapPercent(t *testing.T) {
	const mib = 1 << 20
	for _, tc := range []struct {
		live, lists int64
		want        int
	}{
		{0, 0, 100}, {300 * mib, 0, 100}, {300 * mib, 10 * mib, 100}, {400 * mib, 200 * mib, 50}, {400 * mib, 320 * mib, 20}, {300 * mib, 310 * mib, 20},
	} {
		got := heapPercent(tc.live, tc.lists)
		if got != tc.want {
			t.Errorf("%d MiB of lists in %d MiB: %d, want %d", tc.lists/mib, tc.live/mib, got, tc.want)
		}
	}
}
