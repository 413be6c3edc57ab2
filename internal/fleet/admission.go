package fleet

import (
	"context"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
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
	Device     devices.ID
	ClientID   string
	Board      string
	Firmware   string
	ELF        string
	Chip       string
	Language   string
	Serial     string
	ActivateV2 bool
	From       netip.Addr // of the host that asks, as lobby.HostOf makes it; zero if not known
	// Offer is the transport that the reply offers, unless an operator chose
	// another for the device; empty: the node's default.
	Offer devices.Transport
}

// facts are what the device reported, for its row.
func (c *CheckIn) facts(now time.Time) devices.Facts {
	return devices.Facts{Device: c.Device, Board: devices.Clip(c.Board), Firmware: devices.Clip(c.Firmware), ELF: devices.Clip(c.ELF), Chip: devices.Clip(c.Chip),
		Language: devices.Clip(c.Language), Serial: devices.Clip(c.Serial), ActivateV2: c.ActivateV2, CheckedAt: now}
}

// Welcome is what the OTA reply is made of.
type Welcome struct {
	Admitted   bool
	Generation int64             // of its credentials
	Prefer     devices.Transport // empty for the node's default
	Code       string            // six digits to speak while not admitted
	Challenge  string
}

// CheckIn admits a device or makes it wait. A member is admitted from memory. An
// unknown device becomes a member under open admission, for which the database is
// waited for; a known one with another Client-Id waits for approval under either.
// CodeUnavailable: the node does not know its members, the database does not take
// a new one, or too many devices wait.
func (s *Service) CheckIn(ctx context.Context, c CheckIn) (Welcome, error) {
	if len(c.ClientID) > maxClientID {
		return Welcome{}, devices.Errorf(devices.CodeBadRequest, "Client-Id has %d bytes, at most %d are allowed", len(c.ClientID), maxClientID)
	}
	if err := s.registry.Judge(); err != nil {
		return Welcome{}, err
	}
	now := time.Now().UTC()
	is := s.registry.Standing(c.Device, c.ClientID)
	mayJoin := !is.Known && !s.cfg.Approve || is.Member() && is.Client == registry.ClientNone && c.ClientID != ""
	if mayJoin {
		offer := c.Offer
		if offer == devices.TransportNone {
			offer = s.cfg.Offer
		}
		if err := s.registry.Join(ctx, c.Device, c.ClientID, offer); err != nil && devices.AsError(err).Code != devices.CodeForbidden {
			return Welcome{}, err
		}
		is = s.registry.Standing(c.Device, c.ClientID)
	}
	if is.Admits() {
		s.Reported(c.facts(now))
		generation, _ := s.Generation(c.Device)
		return Welcome{Admitted: true, Generation: generation, Prefer: is.Prefer}, nil
	}
	return s.wait(c, is, now)
}

// wait gives a client a code to speak. That it waits is known in memory alone, on
// all nodes, until somebody approves it.
func (s *Service) wait(c CheckIn, is registry.Standing, now time.Time) (Welcome, error) {
	p, fresh, err := s.pending.get(c, is.Known, now)
	if err != nil {
		return Welcome{}, err
	}
	if fresh {
		s.ports.Directory.Tell(devices.News{Spoken: p.spoken(c.Device)})
		fields := jsonspan.AppendString([]byte(`"client_id":`), c.ClientID)
		fields = strconv.AppendBool(append(fields, `,"known":`...), is.Known)
		s.ports.Publisher.Publish(devices.Event{Kind: devices.EventPending, Device: c.Device, Time: now, Fields: fields,
			MsgID: c.Device.Token() + "-pending-" + p.challenge})
		s.log.Info("device waits for approval", "device", c.Device, "client", c.ClientID, "known", is.Known)
	}
	generation, _ := s.Generation(c.Device)
	return Welcome{Generation: generation, Prefer: is.Prefer, Code: p.code, Challenge: p.challenge}, nil
}

// Recognize is CheckIn for a device that proves who it is in another way than
// by asking where to go, and says nothing else of itself. An empty clientID is
// that of a member, if there is one.
func (s *Service) Recognize(ctx context.Context, id devices.ID, clientID string) (Welcome, error) {
	if err := s.registry.Judge(); err != nil {
		return Welcome{}, err
	}
	if is := s.registry.Standing(id, clientID); is.Member() && (clientID == "" || is.Client == registry.ClientSame) {
		generation, ok := s.Generation(id)
		return Welcome{Admitted: ok, Generation: generation, Prefer: is.Prefer}, nil
	}
	return s.CheckIn(ctx, CheckIn{Device: id, ClientID: clientID, Offer: devices.TransportMQTT})
}

// Activated tells whether a device that waited is admitted now.
func (s *Service) Activated(id devices.ID, clientID string) bool {
	is := s.registry.Standing(id, clientID)
	return is.Admits()
}

// Approve admits the device, or the other Client-Id of a known device, that
// waits. name is a device id or the code the device speaks; wrong codes are
// limited. The credentials of a replaced client die.
func (s *Service) Approve(ctx context.Context, by access.By, name string) (devices.ID, error) {
	id, spoken, err := s.resolve(name)
	if err != nil {
		return "", err
	}
	is := s.registry.Standing(id, spoken)
	waiting := s.pending.clients(id)
	switch {
	case spoken != "":
	case len(waiting) > 1:
		return "", devices.Errorf(devices.CodeForbidden, "%d clients wait under the id %s; approve the code that the right one speaks", len(waiting), id)
	case len(waiting) == 1:
		spoken = waiting[0].clientID
	case is.Member():
		return id, nil
	case !is.Known:
		return "", registry.Unknown(id)
	}
	permits := permit(by, id)
	return id, s.admit(ctx, by.Key(), id, spoken, func(m *devices.Member) error {
		if !m.Known() { // it waits, and has no labels
			return nil
		}
		return permits(m)
	})
}

// admit makes the device a member, with this Client-Id unless it is empty. refuse
// may prevent that, by what the database holds of it.
func (s *Service) admit(ctx context.Context, who string, id devices.ID, client string, refuse func(*devices.Member) error) error {
	changes, err := s.registry.Approve(ctx, who, id, client, refuse)
	if err != nil {
		return err
	}
	for _, p := range s.pending.clients(id) {
		if p.clientID == client && !p.facts.CheckedAt.IsZero() {
			s.Reported(p.facts)
		}
	}
	s.pending.drop(id)
	if len(changes) > 0 {
		s.log.Info("device approved", "device", id, "client", client)
	}
	return nil
}

// resolve finds the device that name means: its id, else its spoken code, and
// then the client that speaks it.
func (s *Service) resolve(name string) (id devices.ID, spoken string, err error) {
	id, err = devices.ParseID(name)
	if err == nil && (s.registry.Standing(id, "").Known || s.pending.waits(id, time.Now())) {
		return id, "", nil
	}
	switch {
	case isCode(name):
		return s.pending.byCode(name, time.Now())
	case err != nil:
		return "", "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	return "", "", s.unknown(id)
}

// unknown is the error for a device that this node does not know.
func (s *Service) unknown(id devices.ID) error {
	if err := s.registry.Judge(); err != nil {
		return err
	}
	return registry.Unknown(id)
}

func isCode(name string) bool {
	_, err := strconv.ParseUint(name, 10, 32)
	return err == nil && len(name) == 6
}

// Revoke makes the device's credentials invalid and ends its session; it waits
// for approval at its next check. While the database is away it is in force on
// the nodes that the answer names, and written when that is back.
func (s *Service) Revoke(ctx context.Context, by access.By, id devices.ID) (registry.Revoked, error) {
	r, err := s.registry.Revoke(ctx, by.Key(), id, permit(by, id))
	if err == nil {
		s.log.Info("device revoked", "device", id, "recorded", r.Recorded)
	}
	return r, err
}

// Forget removes a device and its history. Its generation goes up, so that
// credentials it still holds stay dead. One that merely waits is turned away
// until it asks again.
func (s *Service) Forget(ctx context.Context, by access.By, id devices.ID) error {
	return s.ForgetAt(ctx, by, id, 0)
}

// ForgetAt is Forget for the device at this revision; 0: whatever it is.
func (s *Service) ForgetAt(ctx context.Context, by access.By, id devices.ID, ifMatch int64) error {
	waited := s.pending.waits(id, time.Now())
	err := s.registry.ForgetAt(ctx, by.Key(), id, ifMatch, permit(by, id))
	if err == nil || devices.AsError(err).Code == devices.CodeDeviceUnknown {
		s.pending.drop(id)
	}
	if waited && err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown {
		return nil
	}
	if err == nil {
		s.log.Info("device forgotten", "device", id)
	}
	return err
}

// Welcome is what CheckIn would answer the device's admitted client now; it
// changes nothing.
func (s *Service) Welcome(id devices.ID) Welcome {
	is := s.registry.Standing(id, "")
	generation, ok := s.Generation(id)
	return Welcome{Admitted: is.Member() || !is.Known && ok && !s.cfg.Approve, Generation: generation, Prefer: is.Prefer}
}

// Knows tells whether the device is known, admitted or not, or may be: before the
// members are read nobody can tell.
func (s *Service) Knows(id devices.ID) bool {
	return !s.registry.Ready() || s.registry.Standing(id, "").Known || s.pending.waits(id, time.Now())
}

// IsMember tells whether the device is known and admitted.
func (s *Service) IsMember(id devices.ID) bool { return s.registry.Standing(id, "").Member() }

// MemberOf tells whether the device is known and admitted, or may be, for adapters
// that act on its behalf.
func (s *Service) MemberOf(id devices.ID) bool { return !s.registry.Ready() || s.IsMember(id) }

// ClientOf is the admitted Client-Id of a device; empty if there is none, or it
// cannot be read from the database now.
func (s *Service) ClientOf(ctx context.Context, id devices.ID) string {
	m, err := s.registry.Decided(ctx, id)
	if err != nil {
		return ""
	}
	return m.ClientID
}
