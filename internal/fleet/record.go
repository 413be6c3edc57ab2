package fleet

import (
	"strings"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
)

// NoteRefusal records that an adapter refused a request before it became a call:
// because of its token or scope.
func (s *Service) NoteRefusal(principal access.Principal, action string, id devices.ID, err error) {
	s.auditChange(principal, audit.KindRefusal, action, id, "", err)
}

// NoteChange records a change of a device, or the attempt.
func (s *Service) NoteChange(principal access.Principal, action string, id devices.ID, detail string, err error) {
	s.auditChange(principal, audit.KindDevice, action, id, detail, err)
}

// NoteCredential records a change of attestation keys or of the fleet's credentials, as
// opposed to those of one device.
func (s *Service) NoteCredential(principal access.Principal, action, detail string, err error) {
	s.auditChange(principal, audit.KindCredential, action, "", detail, err)
}

// auditChange records a change, or the attempt.
func (s *Service) auditChange(principal access.Principal, kind audit.Kind, action string, id devices.ID, detail string, err error) {
	e := dispatch.EntryOf(clock.Now(), principal, kind, action, id)
	e.Detail, e.Outcome = detail, audit.OutcomeOK
	if err != nil {
		refusal := devices.AsError(err)
		e.Outcome, e.Rule, e.Detail = string(refusal.Code), refusal.Rule, strings.TrimPrefix(detail+": "+refusal.Detail, ": ")
	}
	s.Record(e)
}
