package node

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// The collector lets the heap grow by what lives on it, so that tool lists, up
// to --catalog-memory and what waits for the database, would cost twice their
// bytes. They live long and hold no pointers: nothing is gained by waiting for as
// much garbage again.
const (
	collectEvery   = time.Second
	collectPercent = 100 // the runtime's own, unless GOGC says otherwise
	collectLeast   = 20  // below it collecting takes more than it gives
)

// collect keeps the heap from growing on account of bytes of tool lists, until
// ctx ends.
func (n *node) collect(ctx context.Context) {
	if given := debug.SetGCPercent(collectPercent); given != collectPercent {
		debug.SetGCPercent(given) // the operator has decided
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

// heapPercent is how much a heap may grow of which these bytes are tool lists,
// in steps, since setting it stops the program for a moment.
func heapPercent(live, lists int64) int {
	if live <= 0 || lists*20 < live { // as it mostly is
		return collectPercent
	}
	const step = 10
	return max(collectLeast, int(collectPercent*(live-lists)/live)/step*step)
}
