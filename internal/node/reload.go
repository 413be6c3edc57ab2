package node

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
)

// reloadTick is how often changed files are looked for.
const reloadTick = time.Second

// reloadable is a set of files that are loaded again when they change. If they cannot be loaded, what was loaded before
// stays in force.
type reloadable struct {
	names  []string
	every  time.Duration // between two looks at the files; 0: reloadTick
	reload func() error

	checked   time.Time
	lastStamp string // at the last attempt, successful or not

	reloads, failures atomic.Uint64
}

// begin notes the version of the files. It comes before they are loaded for the first time: a write meanwhile is then
// detected as a change.
func (r *reloadable) begin(reload func() error, every time.Duration, names ...string) {
	r.reload, r.every, r.names = reload, every, names
	r.checked, r.lastStamp = time.Now(), r.stamp()
}

// stamp identifies a version of the files. A renewal may set an older time, so any difference counts as a change.
func (r *reloadable) stamp() (s string) {
	for _, name := range r.names {
		if info, err := os.Stat(name); err == nil {
			s += fmt.Sprintln(name, info.ModTime().Format(time.RFC3339Nano), info.Size())
		}
	}
	return s
}

// check loads the files if they have changed since the last attempt, so that an invalid one is logged once; requested: now,
// and also if they have not. Only one goroutine may call it.
func (r *reloadable) check(requested bool) {
	if !requested && time.Since(r.checked) < r.every {
		return
	}
	now := r.stamp()
	changed := now != r.lastStamp
	r.checked, r.lastStamp = time.Now(), now
	if !changed && !requested {
		return
	}
	if r.reload() != nil {
		r.failures.Add(1)
	} else {
		r.reloads.Add(1)
	}
}

// catchHangups makes SIGHUP a request to reload files, from the start of the node; it never
// ends the process. If the process was started with the signal ignored, as by nohup, it stays
// ignored, and hangups is nil.
func catchHangups() (hangups chan os.Signal, release func()) {
	if signal.Ignored(syscall.SIGHUP) {
		return nil, func() {}
	}
	hangups = make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	return hangups, func() { signal.Stop(hangups) }
}

// reload loads the node's files again, the certificates and the policy, when they change and at each SIGHUP, until ctx ends.
func (n *node) reload(ctx context.Context) {
	ticker := time.NewTicker(reloadTick)
	defer ticker.Stop()
	for {
		requested := false
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-n.hangups:
			requested = true
			n.log.Info("SIGHUP: reloading certificates and policy")
		}
		for _, r := range n.reloadables {
			r.check(requested)
		}
	}
}
