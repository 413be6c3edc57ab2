package explain

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

const (
	// MaxOffline is how many devices one page of Offline explains.
	MaxOffline = 1000
	// offlineBatch is how many of them are one question to the nodes, and offlineSteps how
	// many steps of each an answer has, and offlineOthers of those that proved nothing: what an
	// answer may have holds that many.
	offlineBatch  = 200
	offlineSteps  = 20
	offlineOthers = 4
)

// batch requests the records of some devices.
type batch struct {
	Devices []devices.ID `json:"devices"`
	// Restarts requests the calls that restarted them as well.
	Restarts bool `json:"restarts,omitempty"`
}

// ofBatch returns what this node recorded of a batch.
func (x *Explainer) ofBatch(q *batch) (out records) {
	for _, id := range q.Devices[:min(len(q.Devices), offlineBatch)] {
		out.Steps = append(out.Steps, x.opt.Records.Steps(id, true, "", devices.LogPosition{}, offlineSteps)...)
		out.Steps = append(out.Steps, x.opt.Records.Steps(id, false, "", devices.LogPosition{}, offlineOthers)...)
	}
	if q.Restarts {
		out.Calls = x.opt.Records.CallsOn(q.Devices, outcomeRestarting)
	}
	return out
}

// Offline explains one page of the devices that are offline, of those that the selector
// matches and the caller may see, and groups them by cause. The next page begins after
// next_cursor; a page may be short or empty although more follow.
func (x *Explainer) Offline(ctx context.Context, by access.Principal, sel selector.Selector, after string, limit int) (api.OfflineCauses, error) {
	q := offlineQuery(by.Caller, sel, min(max(limit, 1), MaxOffline))
	q.After = after
	views, next, err := x.opt.Devices.List(ctx, q)
	if err != nil {
		return api.OfflineCauses{}, err
	}
	now := clock.Now()
	var batches []*batchAnswers
	var work sync.WaitGroup
	for part := range slices.Chunk(views, offlineBatch) {
		b := &batchAnswers{views: part, q: batchOf(now, part)}
		batches = append(batches, b)
		work.Go(func() { b.answers, b.err = x.ask(ctx, question{Batch: b.q}) })
	}
	work.Wait()
	var causes []Cause
	missing := map[string]bool{}
	for _, b := range batches { // what computes does so here, in the slot of the request
		if b.err != nil {
			return api.OfflineCauses{}, b.err
		}
		g := x.merge(question{Batch: b.q}, b.answers)
		causes = append(causes, causesOf(now, b.views, &g)...)
		for _, node := range g.missing {
			missing[node] = true
		}
	}
	out := api.OfflineCauses{Groups: []api.OfflineCause{}, Explained: len(views), NextCursor: next, Missing: []string{}}
	groups := map[Cause]*api.OfflineCause{}
	for i, cause := range causes {
		g := groups[cause]
		if g == nil {
			g = &api.OfflineCause{Cause: string(cause), Well: isWell(cause), Next: cause.next("DEVICE")}
			groups[cause] = g
		}
		g.Devices = append(g.Devices, string(views[i].Device.ID))
		x.Explained.Add(string(cause), 1)
	}
	for _, g := range groups {
		g.Count = len(g.Devices)
		out.Groups = append(out.Groups, *g)
	}
	slices.SortFunc(out.Groups, func(a, b api.OfflineCause) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Cause, b.Cause))
	})
	for node := range missing {
		out.Missing = append(out.Missing, node)
	}
	slices.Sort(out.Missing)
	return out, nil
}

// batchAnswers are what other nodes answered about a batch.
type batchAnswers struct {
	views []devices.View
	q     *batch
	answers
	err error
}

func batchOf(now time.Time, views []devices.View) *batch {
	q := &batch{Devices: make([]devices.ID, len(views))}
	for i := range views {
		q.Devices[i] = views[i].Device.ID
		q.Restarts = q.Restarts || now.Sub(views[i].Presence.LastSeen) <= restartTime
	}
	return q
}

// causesOf returns the cause of each device of a batch.
func causesOf(now time.Time, views []devices.View, g *gathered) []Cause {
	steps, calls := map[devices.ID][]devices.Step{}, map[devices.ID][]devices.CallStep{}
	for _, s := range g.steps {
		steps[s.Device] = append(steps[s.Device], s)
	}
	for _, c := range g.calls {
		calls[c.Device] = append(calls[c.Device], c)
	}
	causes := make([]Cause, len(views))
	for i := range views {
		id := views[i].Device.ID
		causes[i] = explainDevice(&facts{now: now, view: views[i], found: true, steps: steps[id], calls: calls[id]}).cause
	}
	return causes
}

// isWell reports whether a device with this cause has nothing wrong with it.
func isWell(c Cause) bool { return c == "well" || c == causeAsleep }
