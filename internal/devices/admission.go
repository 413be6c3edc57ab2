package devices

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/jsonspan"
)

// Limits of activation.
const (
	CodeLife      = 10 * time.Minute // of one spoken code
	MaxPending    = 10_000           // devices waiting with a code at once
	MaxWrongCodes = 10               // per wrongCodeSpan, over all callers
	wrongCodeSpan = time.Minute
	maxClientID   = 128
)

// CheckIn is what a device says at its OTA check.
type CheckIn struct {
	Device     ID
	ClientID   string
	Board      string
	Firmware   string
	ELF        string
	Chip       string
	Language   string
	Serial     string
	ActivateV2 bool
	From       netip.Addr // of the host that asks, as lobby.HostOf makes it; zero if not known
}

// Welcome is what the OTA reply is made of.
type Welcome struct {
	Admitted   bool
	Generation int64     // of its credentials
	Prefer     Transport // empty for the node's default
	Code       string    // six digits to speak while not admitted
	Challenge  string
}

// CheckIn admits a device or makes it wait, from memory alone. Under open
// admission an unknown device becomes a member; a known one with another
// Client-Id waits for approval under either. CodeUnavailable: the node does
// not know its members yet, or too many devices wait.
func (s *Service) CheckIn(c CheckIn) (Welcome, error) {
	if len(c.ClientID) > maxClientID {
		return Welcome{}, fail(CodeBadRequest, "Client-Id has %d bytes, at most %d are allowed", len(c.ClientID), maxClientID)
	}
	if !s.loaded.Load() {
		return Welcome{}, &Error{Code: CodeUnavailable, Part: "database", Detail: "this node has not read its members yet; ask again"}
	}
	now := time.Now().UTC()
	minted := false
	if s.hub.get(c.Device) == nil {
		var err error
		if minted, err = s.room(c); err != nil {
			return Welcome{}, err
		}
	}
	describe := func(d *Device) {
		d.Board, d.Firmware, d.ELF = s.strings.get(clip(c.Board)), s.strings.get(clip(c.Firmware)), s.strings.get(clip(c.ELF))
		d.Chip, d.Language, d.Serial = s.strings.get(clip(c.Chip)), s.strings.get(clip(c.Language)), clip(c.Serial)
		d.ActivateV2, d.CheckedAt = c.ActivateV2, now
	}
	e, created := s.hub.ensure(c.Device, func() *Device {
		d := &Device{ID: c.Device, ClientID: c.ClientID, Admission: AdmissionMember, FirstSeen: now}
		if s.cfg.Approve {
			d.ClientID, d.PendingID, d.Admission = "", c.ClientID, AdmissionPending
		}
		describe(d)
		return d
	})
	e.mu.Lock()
	d := e.device.Load()
	before := *d
	foreign := d.ClientID != "" && d.ClientID != c.ClientID
	admitted := d.Admission == AdmissionMember && !foreign && !e.revoked
	if !created || e.revoked {
		d = e.updateLocked(func(d *Device) {
			if admitted {
				describe(d)
				d.ClientID = c.ClientID
				return
			}
			d.PendingID, d.CheckedAt = c.ClientID, now
			if !foreign {
				describe(d)
			}
		})
	}
	welcome := Welcome{Admitted: admitted, Generation: e.current(s.fleetRotation()), Prefer: d.Prefer}
	e.mu.Unlock()
	s.saveDevice(d)
	if created || before.Admission != d.Admission || before.ClientID != d.ClientID || before.PendingID != d.PendingID {
		s.ports.Directory.Tell(News{Device: d})
	}
	if admitted {
		return welcome, nil
	}
	p, fresh, err := s.pending.get(c.Device, c.ClientID, c.From, now)
	if err != nil {
		return Welcome{}, err
	}
	if fresh || minted {
		s.ports.Directory.Tell(News{Spoken: &Spoken{c.Device, c.ClientID, p.code, p.challenge, p.renewal}})
		fields := jsonspan.AppendString([]byte(`"client_id":`), c.ClientID)
		fields = strconv.AppendBool(append(fields, `,"known":`...), foreign)
		s.ports.Publisher.Publish(Event{Kind: EventPending, Device: c.Device, Time: now, Fields: fields,
			MsgID: c.Device.Token() + "-pending-" + p.challenge})
		s.log.Info("device waits for approval", "device", c.Device, "client", c.ClientID, "known", foreign)
	}
	welcome.Code, welcome.Challenge = p.code, p.challenge
	return welcome, nil
}

// Recognize is CheckIn for a device that proves who it is in another way than
// by asking where to go, and says nothing else of itself. An empty clientID is
// that of a member, if there is one.
func (s *Service) Recognize(id ID, clientID string) (Welcome, error) {
	if e := s.hub.get(id); e != nil {
		d := e.device.Load()
		if clientID == "" {
			clientID = d.ClientID
		}
		if d.Admission == AdmissionMember && (d.ClientID == "" || d.ClientID == clientID) {
			generation, ok := s.Generation(id)
			return Welcome{Admitted: ok && s.loaded.Load(), Generation: generation, Prefer: d.Prefer}, nil
		}
	}
	return s.CheckIn(CheckIn{Device: id, ClientID: clientID})
}

// MaxKnown bounds the devices that a node knows: with open admission anybody
// can invent more.
const MaxKnown = 500_000

// room refuses an unknown device for which there is none. One that will wait
// gets its code here; minted tells whether it is a new one.
func (s *Service) room(c CheckIn) (minted bool, err error) {
	if s.hub.count.Load() >= MaxKnown {
		return false, fail(CodeUnavailable, "%d devices are known; forget some", MaxKnown)
	}
	if !s.cfg.Approve {
		return false, nil
	}
	_, minted, err = s.pending.get(c.Device, c.ClientID, c.From, time.Now())
	return minted, err
}

// pendingLife is how long a device that was never approved is remembered.
const pendingLife = 24 * time.Hour

// expirePending ends what nobody approved: another client's claim on a member
// with its code, a device that never was one after a day.
func (s *Service) expirePending(e *entry, now time.Time) {
	d := e.device.Load()
	if d.PendingID == "" || s.pending.waits(e.id, now) {
		return
	}
	if d.Admission == AdmissionPending {
		if now.Sub(d.CheckedAt) > pendingLife {
			ctx, cancel := context.WithTimeout(s.ctx, lookupTimeout)
			defer cancel()
			if err := s.Forget(ctx, e.id); err != nil {
				s.log.Debug("device not forgotten", "device", e.id, "error", err)
			}
		}
		return
	}
	if d.Admission == AdmissionMember {
		s.saveDevice(e.update(func(d *Device) { d.PendingID = "" }))
	}
}

// excepted passes a change of exceptional credentials on.
func (s *Service) excepted(x Exception) {
	s.ports.Keeper.SaveException(x)
	s.ports.Directory.Tell(News{Exception: &x})
	s.noted()
}

// Activated tells whether a device that waited is admitted now.
func (s *Service) Activated(id ID, clientID string) bool {
	e := s.hub.get(id)
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.device.Load()
	return d.Admission == AdmissionMember && !e.revoked && d.ClientID == clientID
}

// Approve admits the device, or the other Client-Id of a known device, that
// waits. name is a device id or the code the device speaks; wrong codes are
// limited. The credentials of a replaced client die.
func (s *Service) Approve(name string) (ID, error) {
	id, spoken, err := s.resolve(name)
	if err != nil {
		return "", err
	}
	e, err := s.known(id)
	if err != nil {
		return "", err
	}
	e.mu.Lock()
	d := e.device.Load()
	if d.Admission == AdmissionMember && d.PendingID == "" && !e.revoked {
		e.mu.Unlock()
		return id, nil
	}
	client := d.PendingID
	e.mu.Unlock()
	if spoken != "" {
		client = spoken
	} else if n := s.pending.clients(id); n > 1 {
		return "", fail(CodeForbidden, "%d clients wait under the id %s; approve the code that the right one speaks", n, id)
	}
	s.admit(e, client, func(*Device) string { return "" })
	s.awaitWritten(id)
	return id, nil
}

// admit makes the device a member, with this Client-Id unless it is empty. What
// refuse finds, holding the lock, prevents that.
func (s *Service) admit(e *entry, client string, refuse func(*Device) (reason string)) (refused string) {
	e.mu.Lock()
	before := e.device.Load()
	if refused = refuse(before); refused != "" {
		e.mu.Unlock()
		return refused
	}
	replaced := before.ClientID != "" && client != "" && client != before.ClientID
	d := e.updateLocked(func(d *Device) {
		d.Admission, d.PendingID = AdmissionMember, ""
		if client != "" {
			d.ClientID = client
		}
	})
	wasRevoked := e.revoked
	e.revoked = false
	if replaced {
		e.raise(s.fleetRotation())
	}
	x := e.change(e.id, "approved")
	e.mu.Unlock()
	s.pending.drop(e.id)
	s.saveDevice(d)
	s.ports.Directory.Tell(News{Device: d})
	if replaced || wasRevoked {
		s.excepted(x)
	}
	if replaced {
		e.evict()
	}
	s.log.Info("device approved", "device", e.id, "client", d.ClientID)
	return ""
}

// resolve finds the device that name means: its id, else its spoken code, and
// then the client that speaks it.
func (s *Service) resolve(name string) (id ID, spoken string, err error) {
	if id, err = ParseID(name); err == nil && s.hub.get(id) != nil {
		return id, "", nil
	}
	switch {
	case isCode(name):
		return s.pending.byCode(name, time.Now())
	case err != nil:
		return "", "", fail(CodeBadRequest, "%v", err)
	}
	_, err = s.known(id)
	return "", "", err
}

func isCode(name string) bool {
	_, err := strconv.ParseUint(name, 10, 32)
	return err == nil && len(name) == 6
}

// Revoke makes the device's credentials invalid and ends its session; it waits
// for approval at its next check.
func (s *Service) Revoke(id ID) error {
	e, err := s.known(id)
	if err != nil {
		return err
	}
	e.mu.Lock()
	d := e.updateLocked(func(d *Device) { d.Admission = AdmissionRevoked })
	e.revoked = true
	e.raise(s.fleetRotation())
	x := e.change(id, "revoked")
	e.mu.Unlock()
	s.excepted(x)
	s.saveDevice(d)
	s.ports.Directory.Tell(News{Device: d})
	e.evict()
	s.awaitWritten(id)
	s.log.Info("device revoked", "device", id)
	return nil
}

// reasonForgotten is the Reason of the exception that a forgotten device leaves
// behind.
const reasonForgotten = "forgotten"

// forgotAs raises the generation of a device that is being forgotten, and returns
// the exception to be made of it; false if the device was never given any
// credentials, so that none can come back.
func (e *entry) forgotAs(r Rotation) (x Exception, excepted bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.device.Load()
	if excepted = d.Admission != AdmissionPending || d.ClientID != "" || e.secrets != (secrets{}) || e.lastEpoch != 0; excepted {
		e.raise(r)
		x = e.change(e.id, reasonForgotten)
	} else {
		x = e.exception(e.id, reasonForgotten)
	}
	x.Revoked = false // whoever comes under the id is a stranger
	return x, excepted
}

// Forget removes a device and its history. Its generation goes up, so that
// credentials it still holds stay dead.
func (s *Service) Forget(ctx context.Context, id ID) error {
	e, err := s.known(id)
	if err != nil {
		return err
	}
	x, excepted := e.forgotAs(s.fleetRotation())
	if excepted {
		s.excepted(x)
	}
	e.evict()
	s.pending.drop(id)
	if err := s.ports.Keeper.Forget(ctx, id); err != nil {
		return fmt.Errorf("forget %s: %w", id, err)
	}
	e.mu.Lock()
	e.forgotten = true
	e.mu.Unlock()
	if !excepted { // it may have been admitted while the records were removed
		if x, excepted = e.forgotAs(s.fleetRotation()); excepted {
			s.excepted(x)
		}
	}
	s.hub.leave(x)
	s.hub.remove(id)
	s.ports.Directory.Tell(News{Exception: &x, Forgotten: true})
	e.evict() // it may have come while the records were removed
	s.noted()
	s.log.Info("device forgotten", "device", id)
	return nil
}

// applyException brings a stored exception into force.
func (s *Service) applyException(x Exception) {
	e := s.hub.get(x.Device)
	if e == nil {
		s.hub.leave(x)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if theirs := secretsOf(x); theirs.generation > e.generation || theirs.generation == e.generation && theirs.changed >= e.changed {
		confirmed := e.confirmed
		e.secrets = theirs
		e.confirmed = confirmed
	}
}

// Welcome is what CheckIn would answer the device's admitted client now; it
// changes nothing.
func (s *Service) Welcome(id ID) Welcome {
	e := s.hub.get(id)
	if e == nil {
		generation, ok := s.Generation(id)
		return Welcome{Admitted: ok && !s.cfg.Approve, Generation: generation}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	d := e.device.Load()
	return Welcome{Admitted: d.Admission == AdmissionMember && !e.revoked, Generation: e.current(s.fleetRotation()), Prefer: d.Prefer}
}

// Knows tells whether the device is known, admitted or not, or may be: before the
// members are read nobody can tell.
func (s *Service) Knows(id ID) bool { return s.hub.get(id) != nil || !s.loaded.Load() }

// IsMember tells whether the device is known and admitted.
func (s *Service) IsMember(id ID) bool {
	e := s.hub.get(id)
	return e != nil && e.device.Load().Admission == AdmissionMember
}

// ClientOf is the admitted Client-Id of a device; empty if there is none.
func (s *Service) ClientOf(id ID) string {
	if e := s.hub.get(id); e != nil {
		return e.device.Load().ClientID
	}
	return ""
}
