package devices

import (
	"maps"
	"time"
)

// decide notes the time of every part that differs from what it was before.
func (d *Device) decide(before *Device) {
	was := before.DecidedAt()
	now := time.Now().UnixMicro()
	stamps := was
	stamp := func(at *int64, changed bool) {
		if changed { // another node's clock may be ahead
			*at = max(now, *at+1)
			d.EditedAt = later(d.EditedAt, time.UnixMicro(*at).UTC())
		}
	}
	stamp(&stamps.Client, d.ClientID != before.ClientID || d.Admission != before.Admission)
	stamp(&stamps.Name, d.Name != before.Name)
	stamp(&stamps.Labels, !maps.Equal(d.Labels, before.Labels))
	stamp(&stamps.Prefer, d.Prefer != before.Prefer)
	if stamps != was {
		d.Decided = stamps
	}
}

// DecidedAt is Decided with EditedAt in place of what is missing; 1 is a part
// that was never decided. An EditedAt above all parts is that of a program from
// before the parts had times: then all of them are from that moment.
func (d *Device) DecidedAt() Decided {
	edited := int64(1)
	if !d.EditedAt.IsZero() {
		edited = d.EditedAt.UnixMicro()
	}
	out := d.Decided
	older := edited > max(out.Client, out.Name, out.Labels, out.Prefer)
	for _, at := range []*int64{&out.Client, &out.Name, &out.Labels, &out.Prefer} {
		if older || *at == 0 {
			*at = edited
		}
	}
	return out
}

// KeepNewer takes over from another state of the same device what is newer
// there: what the device reported at its last OTA check, and each part of what
// was decided of it, by a time of its own. It reports whether the labels are
// among that. FirstSeen stays.
//
// Which client waits changes with both, a check and a decision, and belongs to
// whichever came last. It is not a decision itself: anybody can ask under the
// id of a device.
func (d *Device) KeepNewer(other *Device) (labels bool) {
	if later(other.CheckedAt, other.EditedAt).After(later(d.CheckedAt, d.EditedAt)) {
		d.PendingID = other.PendingID
	}
	if other.CheckedAt.After(d.CheckedAt) {
		d.Board, d.Firmware, d.ELF, d.Chip = other.Board, other.Firmware, other.ELF, other.Chip
		d.Language, d.Serial, d.ActivateV2, d.CheckedAt = other.Language, other.Serial, other.ActivateV2, other.CheckedAt
	}
	mine, theirs := d.DecidedAt(), other.DecidedAt()
	kept := mine
	newer := func(mine *int64, theirs int64) bool {
		if theirs <= *mine {
			return false
		}
		*mine = theirs
		return true
	}
	if newer(&kept.Client, theirs.Client) {
		d.ClientID, d.Admission = other.ClientID, other.Admission
		if d.PendingID == d.ClientID { // it waited until this decision, by the clock of another node
			d.PendingID = ""
		}
	}
	if newer(&kept.Name, theirs.Name) {
		d.Name = other.Name
	}
	if labels = newer(&kept.Labels, theirs.Labels); labels {
		d.Labels = other.Labels
	}
	if newer(&kept.Prefer, theirs.Prefer) {
		d.Prefer = other.Prefer
	}
	if kept != mine {
		d.Decided = kept
	}
	d.EditedAt = later(d.EditedAt, other.EditedAt)
	return labels
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
