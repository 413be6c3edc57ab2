package node

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// The garbage collector lets the heap grow in proportion to the live heap, so that tool lists
// (up to --catalog-memory, and those queued for the database) would need twice their bytes.
// They are long-lived and contain no pointers, so that collecting earlier is cheap.
const (
	collectEvery   = time.Second
	collectPercent = 100 // the runtime's default, unless GOGC is set
	collectLeast   = 20  // below it, collecting costs more than it frees
)

// collect keeps the heap from growing in proportion to the bytes of tool lists, until ctx
// ends.
func (n *node) collect(ctx context.Context) {
	if given := debug.SetGCPercent(collectPercent); given != collectPercent {
		debug.SetGCPercent(given) // GOGC takes precedence
		return
	}
	defer debug.SetGCPercent(collectPercent)
	ticker := time.NewTicker(collectEvery)
	defer ticker.Stop()
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	last := collectPercent
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		metrics.Read(sample)
		_, lists := n.service.CatalogUsage()
		percent := heapPercent(int64(sample[0].Value.Uint64()), lists+n.store.Stats().QueueBytes.Load())
		if percent != last {
			debug.SetGCPercent(percent)
			last = percent
		}
	}
}

// heapPercent returns the GC percentage for a heap with these bytes of tool lists, in steps,
// because setting it stops the program for a moment.
func heapPercent(live, lists int64) int {
	if live <= 0 || lists*20 < live { // the usual case
		return collectPercent
	}
	const step = 10
	return max(collectLeast, int(collectPercent*(live-lists)/live)/step*step)
}
