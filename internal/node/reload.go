package node

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// catchHangups makes SIGHUP a request to read files again, from the first moment
// of the node on; it never ends it. A process that was started to ignore the
// signal, as by nohup, goes on ignoring it: hangups is then nil.
func catchHangups() (hangups chan os.Signal, release func()) {
	if signal.Ignored(syscall.SIGHUP) {
		return nil, func() {}
	}
	hangups = make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	return hangups, func() { signal.Stop(hangups) }
}

// reloads reads the node's files again at each SIGHUP, until ctx ends: the
// certificates and the policy. What cannot be read leaves in force what was.
func (n *node) reloads(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.hangups:
		}
		n.log.Info("SIGHUP: reading certificates and policy again")
		for _, c := range []*certificate{n.certificate, n.apiCertificate} {
			if c != nil {
				c.reload()
			}
		}
		if n.policy != nil {
			n.policy.request()
		}
	}
}
