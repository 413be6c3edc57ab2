package devices

import (
	"context"
	"fmt"
	"time"

	"fleetd/internal/access"
)

// News is what one node decided about a device and every other must know at
// once: whom it admits, whose credentials are worth nothing any more, and what
// the operator wrote. The database has it too, but is asked only at the start.
type News struct {
	Device    *Device    `json:"device,omitempty"`
	Exception *Exception `json:"exception,omitempty"`
	Forgotten bool       `json:"forgotten,omitempty"` // the device of Exception is no member any more
	Spoken    *Spoken    `json:"spoken,omitempty"`
	// Key is an API key that was made or ended, Policy a new version.
	Key      *access.Key    `json:"key,omitempty"`
	Policy   *access.Policy `json:"policy,omitempty"`
	Disputed *Disputed      `json:"disputed,omitempty"`
	Rotation *Rotation      `json:"rotation,omitempty"` // of the whole fleet
}

// Spoken is the activation code that a waiting client speaks.
type Spoken struct {
	Device    ID     `json:"device"`
	ClientID  string `json:"client_id"`
	Code      string `json:"code"`
	Challenge string `json:"challenge"`
	// Renewal counts the challenges that this code had before.
	Renewal int `json:"renewal,omitempty"`
}

// Learn takes another node's news. Nothing is written: who decides writes. Nor
// does it wait for a device whose session ends: news comes one after the other,
// and a connection may be stuck for seconds.
func (s *Service) Learn(n News) {
	if n.Device != nil {
		s.learnDevice(*n.Device)
	}
	if c := n.Spoken; c != nil {
		now := time.Now() // its life is counted by our own clock
		s.pending.learn(c.Device, pending{clientID: c.ClientID, code: c.Code, challenge: c.Challenge, renewal: c.Renewal, expires: now.Add(CodeLife)}, now)
	}
	if n.Rotation != nil {
		s.learnRotation(*n.Rotation)
	}
	if n.Disputed != nil {
		s.dispute(n.Disputed.Device, time.Now())
	}
	if n.Key != nil {
		s.learnKey(*n.Key)
		s.noted()
	}
	if n.Policy != nil {
		s.learnPolicy(*n.Policy)
		s.noted()
	}
	if n.Exception == nil {
		return
	}
	s.applyException(*n.Exception)
	e := s.hub.get(n.Exception.Device)
	if e == nil {
		return
	}
	if n.Forgotten {
		e.mu.Lock()
		e.forgotten = true
		e.mu.Unlock()
		s.hub.leave(*n.Exception)
		s.hub.remove(e.id)
		s.pending.drop(e.id)
		s.run(e.evict) // not while the node stops, which ends the session as well
	} else if e.holdsOutdated() {
		s.run(e.evict)
	}
	s.noted()
}

func (e *entry) holdsOutdated() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.session.Load()
	return x != nil && e.outdatedLocked(x)
}

// outdatedLocked tells whether the session came in with credentials that are
// worth nothing any more.
func (e *entry) outdatedLocked(x *Session) bool {
	return x.who.Verified && !e.accepts(x.who.Generation, x.svc.fleetRotation(), time.Now())
}

func (s *Service) learnDevice(d Device) {
	d.Board, d.Firmware, d.ELF = s.strings.get(d.Board), s.strings.get(d.Firmware), s.strings.get(d.ELF)
	e, created := s.hub.ensure(d.ID, func() *Device { return &d })
	if created {
		e.mu.Lock()
		e.elsewhere = true
		e.mu.Unlock()
		return
	}
	e.update(func(mine *Device) {
		before := *mine
		*mine = d
		mine.KeepNewer(&before)
	})
	if d.PendingID == "" {
		s.pending.drop(d.ID)
	}
}

// Reload learns everything anew from the database: after the node was cut off
// from the others.
func (s *Service) Reload(ctx context.Context) error {
	if err := s.loadDoors(ctx); err != nil {
		return err
	}
	exceptions, err := s.ports.Keeper.LoadExceptions(ctx)
	if err != nil {
		return fmt.Errorf("load exceptions: %w", err)
	}
	if err := s.loadRotation(ctx); err != nil {
		return err
	}
	stored := map[ID]bool{}
	for _, x := range exceptions {
		stored[x.Device] = false
	}
	err = s.ports.Keeper.LoadDevices(ctx, func(row Row) error {
		if _, exceptional := stored[row.Device.ID]; exceptional {
			stored[row.Device.ID] = true
		}
		s.learnDevice(row.Device)
		return nil
	})
	if err != nil {
		return fmt.Errorf("load devices: %w", err)
	}
	for i := range exceptions {
		x := &exceptions[i]
		s.Learn(News{Exception: x, Forgotten: x.Reason == reasonForgotten && !stored[x.Device] && s.isNews(*x)})
	}
	return nil
}

// isNews tells whether this node did not know of the exception: else a device
// that was forgotten has come back here since, and its row is on its way.
func (s *Service) isNews(x Exception) bool {
	e := s.hub.get(x.Device)
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.generation < x.Generation
}
