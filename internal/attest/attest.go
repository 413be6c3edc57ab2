// Package attest verifies proofs of a device's hardware. Chips with a serial number in their eFuse also hold
// a key that no firmware can read: they answer the challenge of an OTA reply with HMAC-SHA256 under that key
// (ota.cc:421-492). If the operator has imported the keys, a correct answer admits the device without an
// activation code.
//
// The list is in the database, each key sealed with a key that derives from the fleet's secret. It is not
// cached: proofs are rare, and a removed key must become invalid at once on every node. While the database is
// unreachable no device is admitted by proof; devices retry.
package attest

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
)

// Limits of proofs and of the list.
const (
	MaxBody     = 4 << 10         // bytes of a proof; the firmware's has about 250
	MaxImport   = 1000            // keys in one import
	KeySize     = 32              // bytes, of eFuse block KEY0
	MaxSerial   = 64              // characters; the firmware's has 32
	MaxLookups  = 32              // concurrent proofs; others must retry
	lookupTime  = time.Second     // for the database, while the device waits
	unlistedFor = 5 * time.Second // after which an unlisted number is looked up again
	maxUnlisted = 10_000          // unlisted numbers that are remembered
	sealPurpose = "attestation"
	algorithm   = "hmac-sha256"
)

// Outcomes of proofs. The list is complete: every value has a counter. Refusals of the core are counted under
// their own names.
const (
	OutcomeAdmitted    = "admitted"
	OutcomeNone        = "none"        // no proof: firmware without a serial number, or a chip without the unit
	OutcomeMalformed   = "malformed"   // not what the firmware sends
	OutcomeAlgorithm   = "algorithm"   // another algorithm than hmac-sha256
	OutcomeStale       = "stale"       // not the challenge of this client, or a used one
	OutcomeUnlisted    = "unlisted"    // the operator did not import the serial number
	OutcomeWrong       = "wrong"       // the signature is not that of the key
	OutcomeContested   = "contested"   // the number is bound to another device, or the device to another number
	OutcomeUnavailable = "unavailable" // the database is unreachable
	OutcomeBusy        = "busy"        // MaxLookups others are in progress
	OutcomeUnreadable  = "unreadable"  // the key was sealed with another secret
)

// Keys stores the list. Its errors wrap devices.ErrDatabase, devices.ErrNotFound and devices.ErrBound.
type Keys interface {
	Bindings
	Register
}

// Bindings is the part of the list that proofs use.
type Bindings interface {
	// AttestationKey returns one key.
	AttestationKey(ctx context.Context, serial string) (devices.AttestationKey, error)
	// ProvenBy returns the serial number that is bound to a device.
	ProvenBy(ctx context.Context, id devices.ID) (serial string, err error)
	// BindAttestationKey binds a serial number to this device and no other.
	BindAttestationKey(ctx context.Context, serial string, id devices.ID, now time.Time) error
}

// Register is the part of the list that operators use.
type Register interface {
	// SaveAttestationKeys adds keys, all or none; keys of known serial numbers are replaced, and stay bound
	// unless the new ones contain a device.
	SaveAttestationKeys(ctx context.Context, keys []devices.AttestationKey) error
	// AttestationKeys returns at most limit keys after one, by serial number.
	AttestationKeys(ctx context.Context, after string, limit int) ([]devices.AttestationKey, error)
	// ResealAttestationKey replaces the sealed form of a key, if it still equals old.
	ResealAttestationKey(ctx context.Context, serial, old, sealed string) error
	// RemoveAttestationKey removes a key.
	RemoveAttestationKey(ctx context.Context, serial string) error
}

// Core is the part of fleet.Service that proofs use.
type Core interface {
	TakeChallenge(id devices.ID, clientID, challenge string) (back func(), ok bool)
	MayProve(ctx context.Context, id devices.ID, clientID, serial string) (refused string)
	AdmitProven(ctx context.Context, id devices.ID, clientID, serial string, bound bool) (refused string)
	ReportDispute(id devices.ID, clientID, serial string, reason devices.Dispute)
}

// List is the operator's list of chips. It is safe for concurrent use.
type List struct {
	keys  Keys
	mint  *credential.Mint
	log   *slog.Logger
	slots chan struct{}

	mu       sync.Mutex
	unlisted map[string]time.Time // serial numbers that were not found, until when

	// Proofs counts proofs by outcome.
	Proofs counters.Map[string]
}

// New returns a List.
func New(keys Keys, mint *credential.Mint, log *slog.Logger) *List {
	return &List{keys: keys, mint: mint, log: log, slots: make(chan struct{}, MaxLookups), unlisted: map[string]time.Time{}}
}

// proof is the body of an activation request (ota.cc:421-450). A device without a serial number sends an empty
// object.
type proof struct {
	Algorithm string `json:"algorithm"`
	Serial    string `json:"serial_number"`
	Challenge string `json:"challenge"`
	HMAC      string `json:"hmac"`
}

// Prove verifies the proof in the body of an activation request and admits the client if it is correct. The
// outcome is one of the constants, or the reason for which the core refused.
func (l *List) Prove(ctx context.Context, core Core, id devices.ID, clientID string, body io.Reader) (outcome string) {
	defer func() { l.Proofs.Add(outcome, 1) }()
	p, outcome := parse(body)
	if outcome != "" {
		return outcome
	}
	if !l.mayBeListed(p.Serial) {
		return OutcomeUnlisted
	}
	select {
	case l.slots <- struct{}{}:
		defer func() { <-l.slots }()
	default:
		return OutcomeBusy
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	// The challenge is used up before the key is read, so that only one of two answers counts, and is
	// restored if nothing was decided.
	back, ok := core.TakeChallenge(id, clientID, p.Challenge)
	if !ok {
		return OutcomeStale
	}
	outcome = l.judge(ctx, core, id, clientID, p)
	switch outcome {
	case OutcomeUnlisted, OutcomeUnavailable, OutcomeUnreadable, admission.RefusedForeign, admission.RefusedRevoked:
		back()
	}
	return outcome
}

func parse(body io.Reader) (p proof, outcome string) {
	text, err := io.ReadAll(io.LimitReader(body, MaxBody+1))
	if err != nil || len(text) > MaxBody {
		return p, OutcomeMalformed
	}
	if len(strings.TrimSpace(string(text))) == 0 {
		return p, OutcomeNone
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return p, OutcomeMalformed
	}
	switch {
	case p.HMAC == "" || p.Serial == "":
		return p, OutcomeNone
	case p.Algorithm != algorithm:
		return p, OutcomeAlgorithm
	case checkSerial(p.Serial) != nil || len(p.HMAC) != hex.EncodedLen(sha256.Size):
		return p, OutcomeMalformed
	}
	return p, ""
}

func (l *List) judge(ctx context.Context, core Core, id devices.ID, clientID string, p proof) (outcome string) {
	key, err := l.keys.AttestationKey(ctx, p.Serial)
	switch {
	case errors.Is(err, devices.ErrNotFound):
		l.noteUnlisted(p.Serial)
		return OutcomeUnlisted
	case err != nil:
		l.log.Debug("a proof could not be verified", "device", id, "error", err)
		return OutcomeUnavailable
	}
	secret, err := l.mint.Open(sealPurpose, key.Serial, key.Sealed)
	if err != nil {
		l.log.Error("an attestation key cannot be opened: it was imported with another --secret; import it again", "serial", key.Serial)
		return OutcomeUnreadable
	}
	if !isSigned(secret, p) {
		core.ReportDispute(id, clientID, p.Serial, devices.DisputeProof)
		return OutcomeWrong
	}
	bound := key.Device == id
	if key.Device != "" && !bound {
		core.ReportDispute(id, clientID, p.Serial, devices.DisputeSerial)
		return OutcomeContested
	}
	if !bound {
		switch other, err := l.keys.ProvenBy(ctx, id); {
		case err == nil && other != p.Serial:
			core.ReportDispute(id, clientID, p.Serial, devices.DisputeDevice)
			return OutcomeContested
		case err != nil && !errors.Is(err, devices.ErrNotFound):
			return OutcomeUnavailable
		}
		if refused := core.MayProve(ctx, id, clientID, p.Serial); refused != "" {
			return refused
		}
		switch err := l.keys.BindAttestationKey(ctx, p.Serial, id, clock.Now()); {
		case errors.Is(err, devices.ErrBound): // by another node, just now
			core.ReportDispute(id, clientID, p.Serial, devices.DisputeDevice)
			return OutcomeContested
		case errors.Is(err, devices.ErrNotFound): // removed meanwhile
			return OutcomeUnlisted
		case err != nil:
			return OutcomeUnavailable
		}
	}
	if refused := core.AdmitProven(ctx, id, clientID, p.Serial, bound); refused != "" {
		return refused
	}
	l.log.Info("device proved itself", "device", id, "serial", p.Serial)
	return OutcomeAdmitted
}

// isSigned compares in constant time.
func isSigned(key []byte, p proof) bool {
	given, err := hex.DecodeString(p.HMAC)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(p.Challenge))
	return hmac.Equal(mac.Sum(nil), given) && err == nil
}

// mayBeListed avoids queries for pending devices without a listed chip, which repeat every 3 s.
func (l *List) mayBeListed(serial string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	until, known := l.unlisted[serial]
	if known && time.Now().After(until) {
		delete(l.unlisted, serial)
		known = false
	}
	return !known
}

func (l *List) noteUnlisted(serial string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.unlisted) >= maxUnlisted {
		clear(l.unlisted)
	}
	l.unlisted[serial] = time.Now().Add(unlistedFor)
}

func checkSerial(serial string) error {
	if serial == "" || len(serial) > MaxSerial || strings.ContainsFunc(serial, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && r != '-' && r != '_' && r != '.'
	}) {
		return fmt.Errorf("a serial number has 1 to %d characters of [A-Za-z0-9._-]", MaxSerial)
	}
	return nil
}
