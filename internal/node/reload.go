package node

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

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

// reloads reads the node's files again at each SIGHUP, until ctx ends: the certificates and
// the policy. If a file cannot be loaded, the previous one stays in force.
func (n *node) reloads(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.hangups:
		}
		n.log.Info("SIGHUP: reloading certificates and policy")
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
