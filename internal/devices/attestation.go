package devices

import (
	"crypto/subtle"
	"errors"
	"strconv"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/jsonspan"
)

// AttestationKey is one row of the operator's list of chips: who signs with the
// key is the chip with this serial number.
type AttestationKey struct {
	Serial     string
	Device     ID     // the device that it proves; empty until the first proof
	Sealed     string // the key, encrypted
	ImportedAt time.Time
	BoundAt    time.Time // zero: not bound
}

// ErrBound is returned by the keeper of attestation keys where a serial number
// would prove a second device, or a device be proven by a second one.
var ErrBound = errors.New("bound otherwise")

// Dispute is why a device id is contested.
type Dispute string

// Disputes. The list is closed: every value has a counter.
const (
	DisputeFight  Dispute = "fight"        // clients take the id from each other
	DisputeProof  Dispute = "wrong_proof"  // the signature of a listed serial number is wrong
	DisputeSerial Dispute = "other_device" // the serial number proves another device
	DisputeDevice Dispute = "other_serial" // another serial number proves the device
)

// disputeLife is how long a device whose proof was refused shows as contested:
// as long as it has a code.
const disputeLife = CodeLife

// Disputed is the news that a device's proof was refused.
type Disputed struct {
	Device ID      `json:"device"`
	Reason Dispute `json:"reason"`
}

// TakeChallenge uses up the challenge that the client was given, if it is this
// one and still good: each is good for one proof. back makes it good again, for
// a proof that could not be judged.
func (s *Service) TakeChallenge(id ID, clientID, challenge string) (back func(), ok bool) {
	p := s.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, time.Now())
	for i := range p.byDevice[id] {
		w := &p.byDevice[id][i]
		if w.clientID != clientID || w.spent || subtle.ConstantTimeCompare([]byte(w.challenge), []byte(challenge)) != 1 {
			continue
		}
		w.spent = true
		return func() { p.unspend(id, clientID, challenge) }, true
	}
	return nil, false
}

func (p *pendings) unspend(id ID, clientID, challenge string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.byDevice[id] {
		if w := &p.byDevice[id][i]; w.clientID == clientID && w.challenge == challenge {
			w.spent = false
		}
	}
}

// Reasons why a right proof admits nobody. The lists of attest add to them.
const (
	RefusedUnknown = "unknown"   // the device does not wait here
	RefusedRevoked = "revoked"   // an operator revoked it, and has to approve it
	RefusedForeign = "not_bound" // it would replace a member that never named this number
)

// AdmitProven admits the client that waits under the id, as Approve does: its
// hardware has proven itself under this serial number. bound says that the
// number was bound to the device before. Who would replace the client of a
// member needs that, or a member that named the number itself: else whoever has
// any listed chip could take any device. What an operator revoked stays so
// until an operator approves it. refused is why, empty if it is admitted.
func (s *Service) AdmitProven(id ID, clientID, serial string, bound bool) (refused string) {
	e := s.hub.get(id)
	if e == nil {
		return RefusedUnknown
	}
	if refused = s.admit(e, clientID, func(d *Device) string { return e.refusesLocked(d, clientID, serial, bound) }); refused == "" {
		s.record(audit.Entry{At: time.Now(), Kind: audit.KindCredential, Action: "prove", Device: string(id), Outcome: outcomeOK, Detail: clip("serial " + serial + ", client " + clientID)})
	}
	return refused
}

// MayProve is what AdmitProven would refuse a number for that is not bound yet,
// so that it is not bound in vain.
func (s *Service) MayProve(id ID, clientID, serial string) (refused string) {
	e := s.hub.get(id)
	if e == nil {
		return RefusedUnknown
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refusesLocked(e.device.Load(), clientID, serial, false)
}

func (e *entry) refusesLocked(d *Device, clientID, serial string, bound bool) (reason string) {
	switch {
	case e.forgotten:
		return RefusedUnknown
	case e.revoked || d.Admission == AdmissionRevoked:
		return RefusedRevoked
	case d.Admission == AdmissionMember && d.ClientID != "" && d.ClientID != clientID && !bound && d.Serial != serial:
		return RefusedForeign
	}
	return ""
}

// Dispute reports that somebody's proof for the id was refused. The id shows as
// contested for a while; nothing else changes.
func (s *Service) Dispute(id ID, clientID, serial string, reason Dispute) {
	now := time.Now()
	s.stats.Contested.Add(reason, 1)
	s.dispute(id, now)
	s.ports.Directory.Tell(News{Disputed: &Disputed{id, reason}})
	s.log.Warn("device id is contested", "device", id, "client", clientID, "serial", serial, "reason", string(reason))
	s.record(audit.Entry{At: now, Kind: audit.KindRefusal, Action: "prove", Device: string(id), Outcome: string(reason), Detail: clip("serial " + serial + ", client " + clientID)})
	fields := jsonspan.AppendString([]byte(`"client_id":`), clientID)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(reason))
	fields = jsonspan.AppendString(append(fields, `,"serial":`...), serial)
	s.ports.Publisher.Publish(Event{Kind: EventContested, Device: id, Time: now, Fields: fields,
		MsgID: id.Token() + "-contested-" + string(reason) + "-" + strconv.FormatInt(now.Unix()/int64(fightPause/time.Second), 10)})
}

func (s *Service) dispute(id ID, now time.Time) {
	if e := s.hub.get(id); e != nil {
		e.mu.Lock()
		e.disputedUntil = now.Add(disputeLife).UnixNano()
		e.mu.Unlock()
	}
}

// contestedLocked tells whether clients fight for the id, or somebody's proof
// for it was refused lately.
func (e *entry) contestedLocked(now time.Time) bool {
	at := now.UnixNano()
	return e.takeovers.refuses(at) || at < e.disputedUntil && e.disputedUntil-at <= int64(disputeLife) // else the clock was set back
}

// Contested is how many devices are contested as this node sees it.
func (s *Service) Contested() (count int) {
	now := time.Now()
	s.hub.each(func(e *entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.contestedLocked(now) {
			count++
		}
	})
	return count
}

// Chip is one line of the operator's list of chips, as it is imported.
type Chip struct {
	Serial string // as burnt into the chip
	Key    string // eFuse block KEY0, 64 hex digits
	Device string // the device that it proves; empty: the first one that it does
}
