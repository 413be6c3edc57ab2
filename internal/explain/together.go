package explain

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
)

const (
	// endSpread is how far apart the ends of connections are that have one cause. Devices
	// that are found dead differ by their keepalive in addition.
	endSpread = 5 * time.Second
	// manyEnds is how many other devices it takes to blame what they have in common,
	// provided that there were endsFactor times fewer in an equal period before.
	manyEnds   = 10
	endsFactor = 4
	// maxCompared is how many of its devices are compared for a key that is limited to
	// devices, in at most comparedPages pages.
	maxCompared   = 1000
	comparedPages = 10
)

// commonCauses are the causes that many devices may have at once.
var commonCauses = []Cause{"gone", "dead", "idle"}

// nextNetwork is what to do about devices that went away together.
const nextNetwork = "Look at what these devices have in common, not at this one: access point, router, uplink, or the balancer before the nodes."

// endsQuestion requests how many devices went away like one of them did.
type endsQuestion struct {
	devices.Ends
	Remote netip.Addr `json:"remote,omitzero"`
	// Length is that of the period before, which is counted as well.
	Length time.Duration `json:"length"`
	// Limited means that only Devices are counted.
	Limited bool         `json:"limited,omitempty"`
	Devices []devices.ID `json:"devices,omitempty"`
}

// endCounts are devices that went away: of a node, and from the address among them, in the
// period and before it.
type endCounts struct {
	All         int `json:"all"`
	There       int `json:"there"`
	AllBefore   int `json:"all_before"`
	ThereBefore int `json:"there_before"`
}

// countEnds counts what this node recorded.
func (x *Explainer) countEnds(q *endsQuestion) *endCounts {
	count := func(e devices.Ends) (all, there int) { return x.opt.Records.Ended(e, q.Remote) }
	if q.Limited {
		count = func(e devices.Ends) (all, there int) { return x.opt.Records.EndedOf(q.Devices, e, q.Remote) }
	}
	before := q.Ends
	before.From, before.To = q.From.Add(-q.Length), q.From.Add(-time.Nanosecond)
	var c endCounts
	c.All, c.There = count(q.Ends)
	c.AllBefore, c.ThereBefore = count(before)
	return &c
}

// common completes a finding about a device that went away together with others: with
// its address, or from its node. Of a key that is limited to devices, only its own are
// counted that are offline still.
func (x *Explainer) common(ctx context.Context, by access.Principal, f *facts, found finding, address bool) (sentence string, more bool) {
	s, ok := f.last(devices.StepClosed)
	if !ok || by.Caller == nil || !slices.Contains(commonCauses, found.cause) || endCauses[string(s.Cause)] != found.cause || s.At.Before(f.endedAt().Add(-endSpread)) {
		return "", false
	}
	spread := endSpread
	if found.cause == "dead" {
		spread += x.opt.Keepalive
	}
	q := &endsQuestion{Ends: devices.Ends{Cause: s.Cause, Transport: s.Transport, From: s.At.Add(-spread), To: s.At.Add(spread), Except: s.Device}, Remote: s.Remote, Length: 2 * spread}
	if q.Limited = by.Caller.Limited(); q.Limited {
		var err error
		if q.Devices, err = x.wentOffline(ctx, by, q); err != nil || len(q.Devices) < manyEnds {
			return "", false // what is known is explained without them
		}
	}
	g, err := x.gather(ctx, question{Ended: q})
	if err != nil {
		return "", false
	}
	there, before := 0, 0
	for _, c := range g.ends {
		there, before = there+c.There, before+c.ThereBefore
	}
	within := fmt.Sprintf("within %s of it", span(spread))
	switch {
	case s.Remote.IsValid() && isCommon(there, before):
		where := "its address"
		if address {
			where = "the address " + s.Remote.String()
		}
		return fmt.Sprintf("%d others with %s went away %s: look at the network, not the device.", there, where, within), true
	case isCommon(g.ends[s.Node].All, g.ends[s.Node].AllBefore):
		return fmt.Sprintf("%d others of node %s went away %s: look at the network before that node, not the device.", g.ends[s.Node].All, s.Node, within), true
	}
	return "", false
}

func isCommon(n, before int) bool { return n >= manyEnds && n >= endsFactor*before }

func span(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("%d s", int(d.Seconds()))
	}
	return fmt.Sprintf("%.0f min", d.Minutes())
}

// wentOffline returns the devices that the caller may see and that went offline in the
// period or the one before.
func (x *Explainer) wentOffline(ctx context.Context, by access.Principal, q *endsQuestion) (ids []devices.ID, err error) {
	list := offlineQuery(by.Caller, selector.Selector{}, maxCompared)
	list.Sort = devices.SortOfflineSince
	list.After = devices.Cursor{Sort: list.Sort, Number: q.From.Add(-q.Length).UnixMicro() - 1, ID: "~"}.String()
	for range comparedPages {
		page, next, err := x.opt.Devices.List(ctx, list)
		if err != nil {
			return nil, err
		}
		for i := range page {
			if len(ids) == maxCompared || page[i].Presence.OfflineSince.After(q.To.Add(endSpread)) {
				return ids, nil
			}
			ids = append(ids, page[i].Device.ID)
		}
		if next == "" {
			break
		}
		list.After = next
	}
	return ids, nil
}

// offlineQuery returns the query of the devices that are offline, of those that the caller
// may see.
func offlineQuery(who *access.Caller, sel selector.Selector, limit int) devices.ListQuery {
	sel = selector.And(sel, selector.In(selector.FieldState, string(devices.StateOffline)))
	return devices.ListQuery{Select: selector.And(who.Devices, sel), Limit: limit, Members: who.NeedsLabels()}
}
