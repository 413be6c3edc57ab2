package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

// A request on `<prefix>.cmd.jobs` creates a job; one node answers it. A hint on
// `<prefix>.work.<node>`, stamped like a claim, has the other nodes look for work.
const (
	verbJobs = "jobs"
	verbWork = "work"

	createJobTime = 20 * time.Second
)

// HeaderKey names a request for a job, so that its repetition creates nothing.
const HeaderKey = "Idempotency-Key"

// Jobs is what a Link serves and reports of jobs.
type Jobs struct {
	// Create creates a job for a caller and returns it as JSON. Key is an
	// Idempotency-Key, empty for none.
	Create func(ctx context.Context, principal access.Principal, body []byte, key string) ([]byte, error)
	// Look is called when another node has committed work. It must not block.
	Look func()
}

// OnJobs subscribes to requests for jobs and to hints. Call it once, after Attach.
func (l *Link) OnJobs(jobs Jobs) error {
	l.jobs.Store(&jobs)
	if !l.opt.SingleNode {
		if _, err := l.opt.Conn.Subscribe(l.nodeSubject(verbWork, "*"), l.onWork); err != nil {
			return fmt.Errorf("subscribe to hints of other nodes: %w", err)
		}
	}
	if _, err := l.opt.Conn.ChanQueueSubscribe(l.opt.Prefix+".cmd."+verbJobs, queueGroup, l.inbox); err != nil {
		return fmt.Errorf("subscribe to requests for jobs: %w", err)
	}
	return nil
}

// HintWork has the other nodes look for work at once. A hint that is lost delays it by some
// seconds.
func (l *Link) HintWork() { l.broadcast(verbWork, struct{}{}) }

func (l *Link) onWork(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	if msg.Subject != l.nodeSubject(verbWork, l.opt.Node) && l.acceptOnce(msg, verbWork, "") {
		l.Requests.Add(verbWork, 1)
		l.jobs.Load().Look()
	}
}

// createJob answers a request for a job.
func (l *Link) createJob(r request, msg *nats.Msg) ([]byte, error) {
	if r.fromNode {
		return nil, &devices.Error{Code: devices.CodeBadRequest, Detail: "nodes do not create jobs on other nodes"}
	}
	ctx, cancel := context.WithTimeout(l.ctx, createJobTime)
	defer cancel()
	return l.jobs.Load().Create(ctx, r.principal, msg.Data, msg.Header.Get(HeaderKey))
}
