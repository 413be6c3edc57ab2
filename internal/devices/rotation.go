package devices

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Bounds of the time for which credentials stay valid that were rotated. A
// device learns new ones at its OTA check alone, and checks only when it boots.
const (
	DefaultGrace = 720 * time.Hour
	MinGrace     = time.Minute
	MaxGrace     = 8760 * time.Hour
)

// Rotation is the generation below which no device of the fleet is: one fact
// for all of them, so that a rotation of the whole fleet writes one row and
// tells one piece of news, however many devices there are.
type Rotation struct {
	Generation    int64     `json:"generation"`
	Previous      int64     `json:"previous"` // is valid, too, until PreviousUntil
	PreviousUntil time.Time `json:"previous_until"`
}

// ErrRotated is returned by Rotations where somebody else rotated meanwhile.
var ErrRotated = errors.New("rotated meanwhile")

// Rotations keeps the fleet's Rotation; errors wrap ErrDatabase.
type Rotations interface {
	// LoadRotation returns the zero Rotation if there was none.
	LoadRotation(ctx context.Context) (Rotation, error)
	// SwapRotation replaces old, or fails with ErrRotated.
	SwapRotation(ctx context.Context, old, next Rotation) error
}

// Credentials is how far a device's credentials are.
type Credentials struct {
	Generation    int64
	PreviousUntil time.Time // until then older ones are valid, too; zero: they are not
}

// secrets are an entry's own generations; the fleet's count beside them.
type secrets struct {
	generation    int64
	revoked       bool
	previous      int64
	previousUntil int64 // unix microseconds; the own previous generation is valid until then
	confirmed     int64 // the highest generation that a connection came with
	changed       int64 // unix microseconds, by the clock of the node that decided, above every earlier change
}

func secretsOf(x Exception) secrets {
	s := secrets{generation: x.Generation, revoked: x.Revoked, previous: x.Previous}
	if !x.ChangedAt.IsZero() {
		s.changed = x.ChangedAt.UnixMicro()
	}
	if !x.PreviousUntil.IsZero() {
		s.previousUntil = x.PreviousUntil.UnixMicro()
	}
	return s
}

// change is the exception of a decision that was just made. Its time is above
// that of the decision before, whose node may have a clock that is ahead.
func (s *secrets) change(id ID, reason string) Exception {
	s.changed = max(time.Now().UnixMicro(), s.changed+1)
	return s.exception(id, reason)
}

func (s *secrets) exception(id ID, reason string) Exception {
	x := Exception{Device: id, Generation: s.generation, Revoked: s.revoked, Reason: reason, Previous: s.previous}
	if s.changed > 0 {
		x.ChangedAt = time.UnixMicro(s.changed).UTC()
	}
	if s.previousUntil > 0 {
		x.PreviousUntil = time.UnixMicro(s.previousUntil).UTC()
	}
	return x
}

// current is the generation that the device is given.
func (s *secrets) current(r Rotation) int64 { return max(s.generation, r.Generation) }

// raise makes every generation so far worthless.
func (s *secrets) raise(r Rotation) {
	s.generation = s.current(r) + 1
	s.previous, s.previousUntil = 0, 0
}

// maxValid is how many generations can be valid at once: the device's own two
// beside the fleet's two.
const maxValid = 4

// valid lists the generations that open the door, the newest first, and until
// when there is more than one. What was revoked has none, but that is asked
// apart. An older one ends when a connection comes with a newer one.
func (s *secrets) valid(r Rotation, now time.Time) (list [maxValid]int64, n int, until time.Time) {
	list[0], n = s.current(r), 1
	own, fleet := time.UnixMicro(s.previousUntil), r.PreviousUntil
	add := func(generation int64, end time.Time) {
		if generation >= list[0] || generation < s.confirmed || !now.Before(end) {
			return
		}
		if end.After(until) {
			until = end
		}
		for _, g := range list[:n] {
			if g == generation {
				return
			}
		}
		list[n] = generation
		n++
	}
	if s.previousUntil > 0 {
		add(max(s.previous, r.Generation), own)
	}
	if !fleet.IsZero() {
		add(max(s.generation, r.Previous), fleet)
		if s.previousUntil > 0 {
			end := own
			if fleet.Before(own) {
				end = fleet
			}
			add(max(s.previous, r.Previous), end)
		}
	}
	return list, n, until
}

func (s *secrets) accepts(generation int64, r Rotation, now time.Time) bool {
	list, n, _ := s.valid(r, now)
	for _, g := range list[:n] {
		if g == generation {
			return !s.revoked
		}
	}
	return false
}

// fleetRotation is what this node knows of the fleet's.
func (s *Service) fleetRotation() Rotation {
	if r := s.rotation.Load(); r != nil {
		return *r
	}
	return Rotation{}
}

// secretsFor are those of a device, known here or not.
func (s *Service) secretsFor(id ID) secrets {
	if e := s.hub.get(id); e != nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.secrets
	}
	// known to another node, forgotten, or the database was not read yet
	x, _ := s.hub.orphans.Load(id)
	exception, _ := x.(Exception)
	return secretsOf(exception)
}

// Authenticate finds the generation whose credentials were presented. proves
// tells whether they are those of one; all that are valid are tried, whichever
// fits. admitted is false for a device that was revoked.
func (s *Service) Authenticate(id ID, proves func(generation int64) bool) (generation int64, proven, admitted bool) {
	own := s.secretsFor(id)
	list, n, _ := own.valid(s.fleetRotation(), time.Now())
	for _, g := range list[:n] {
		if proves(g) && !proven {
			generation, proven = g, true
		}
	}
	return generation, proven, !own.revoked
}

// Accepts tells whether credentials of this generation open the door.
func (s *Service) Accepts(id ID, generation int64) bool {
	own := s.secretsFor(id)
	return own.accepts(generation, s.fleetRotation(), time.Now())
}

// Generation is the generation of the credentials that a device is given; ok is
// false if none are valid.
func (s *Service) Generation(id ID) (generation int64, ok bool) {
	own := s.secretsFor(id)
	return own.current(s.fleetRotation()), !own.revoked
}

// OldestGeneration is the oldest that is valid, for a connection of which is not
// known what it presented: it must not end the one that it did.
func (s *Service) OldestGeneration(id ID) (generation int64, ok bool) {
	own := s.secretsFor(id)
	list, n, _ := own.valid(s.fleetRotation(), time.Now())
	generation = list[0]
	for _, g := range list[1:n] {
		generation = min(generation, g)
	}
	return generation, !own.revoked
}

func (s *Service) credentials(id ID) Credentials {
	own := s.secretsFor(id)
	list, _, until := own.valid(s.fleetRotation(), time.Now())
	return Credentials{Generation: list[0], PreviousUntil: until}
}

func checkGrace(grace time.Duration) error {
	if grace < MinGrace || grace > MaxGrace {
		return fail(CodeBadRequest, "grace must be a duration from %v to %v, such as %v", MinGrace, MaxGrace, DefaultGrace)
	}
	return nil
}

// Rotate has the device get new credentials at its next OTA check. Those it has
// stay valid until it has connected with the new ones, or grace is over.
func (s *Service) Rotate(id ID, grace time.Duration) error {
	if err := checkGrace(grace); err != nil {
		return err
	}
	e := s.hub.get(id)
	if e == nil {
		return fail(CodeDeviceUnknown, "no device %s is known", id)
	}
	now := time.Now()
	r := s.fleetRotation()
	e.mu.Lock()
	if e.forgotten || e.revoked {
		e.mu.Unlock()
		return fail(CodeForbidden, "the credentials of %s are revoked already; approve it to give it new ones", id)
	}
	if waiting := time.UnixMicro(e.previousUntil); e.previousUntil > 0 && now.Before(waiting) && e.confirmed < e.current(r) {
		e.mu.Unlock()
		return fail(CodeForbidden, "%s was rotated already and has not come with its new credentials yet; its old ones end at %s, or at once if you revoke it",
			id, waiting.UTC().Format(time.RFC3339))
	}
	before := e.generation // its own: what the fleet's rotation keeps valid beside it stays so
	e.raise(r)
	e.previous, e.previousUntil = before, now.Add(grace).UnixMicro()
	x := e.change(id, "rotated")
	e.mu.Unlock()
	s.excepted(x)
	s.awaitWritten(id)
	s.log.Info("device's credentials rotated", "device", id, "generation", x.Generation, "until", x.PreviousUntil)
	return nil
}

// RotateAll is Rotate for every device, those included that come later. It
// needs the database: nodes must not disagree on it.
func (s *Service) RotateAll(ctx context.Context, grace time.Duration) (Rotation, error) {
	if err := checkGrace(grace); err != nil {
		return Rotation{}, err
	}
	if !s.loaded.Load() {
		return Rotation{}, &Error{Code: CodeUnavailable, Part: "database", Detail: "this node has not read its members yet; ask again"}
	}
	now, old := time.Now(), s.fleetRotation()
	if now.Before(old.PreviousUntil) {
		return Rotation{}, fail(CodeForbidden, "the fleet was rotated already; the old credentials end at %s. A single device can be rotated or revoked meanwhile",
			old.PreviousUntil.UTC().Format(time.RFC3339))
	}
	highest := old.Generation
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		highest = max(highest, e.generation)
	})
	s.hub.orphans.Range(func(_, x any) bool {
		highest = max(highest, x.(Exception).Generation)
		return true
	})
	next := Rotation{Generation: highest + 1, Previous: old.Generation, PreviousUntil: now.Add(grace).UTC().Truncate(time.Microsecond)}
	switch err := s.ports.Rotations.SwapRotation(ctx, old, next); {
	case errors.Is(err, ErrRotated):
		return Rotation{}, fail(CodeForbidden, "somebody else rotated the fleet just now")
	case err != nil:
		return Rotation{}, fmt.Errorf("rotate the fleet: %w", err)
	}
	s.learnRotation(next)
	s.ports.Directory.Tell(News{Rotation: &next})
	s.log.Info("the fleet's credentials rotated", "generation", next.Generation, "until", next.PreviousUntil)
	return next, nil
}

// learnRotation takes the fleet's rotation from wherever it comes; the highest
// generation is the latest.
func (s *Service) learnRotation(r Rotation) {
	for {
		old := s.rotation.Load()
		if r.Generation == 0 || old != nil && old.Generation >= r.Generation {
			return
		}
		if s.rotation.CompareAndSwap(old, &r) {
			break
		}
	}
	if s.cfg.Excepted != nil {
		s.cfg.Excepted()
	}
}

// loadRotation reads it from the database.
func (s *Service) loadRotation(ctx context.Context) error {
	r, err := s.ports.Rotations.LoadRotation(ctx)
	if err != nil {
		return fmt.Errorf("load the fleet's rotation: %w", err)
	}
	s.learnRotation(r)
	return nil
}

// KnownRotation and RestoreRotation are Known and Restore for the fleet's
// rotation.
func (s *Service) KnownRotation() Rotation { return s.fleetRotation() }

// RestoreRotation takes it from the node's own notes.
func (s *Service) RestoreRotation(r Rotation) { s.learnRotation(r) }
