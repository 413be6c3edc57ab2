package gatewayapi

import (
	"testing"

	"fleetd/internal/connlimit"
)

// Commands that fail are work of their caller, so that one who sends nothing else waits.
func TestFailedCommandsAreWork(t *testing.T) {
	work := connlimit.NewWork()
	f := newFleet(t, func(o *Options) { o.Work = work })
	for range 2 {
		if r := f.do(t, "POST", statusPath, `{}`); r.status != 400 {
			t.Fatalf("%d %s", r.status, r.body)
		}
	}
	for range 20 {
		work.Charge("gateway", 1<<40)
	}
	// security: N43
	if r := f.do(t, "POST", statusPath, `{}`); r.status != 400 || work.Refused.Load() != 1 {
		t.Errorf("a request that failed: %d, %d over the rate", r.status, work.Refused.Load())
	}
	if r := f.do(t, "POST", statusPath, `{"clientIds":[]}`); r.status != 200 || work.Refused.Load() != 1 {
		t.Errorf("a request: %d %s, %d over the rate", r.status, r.body, work.Refused.Load())
	}
}
