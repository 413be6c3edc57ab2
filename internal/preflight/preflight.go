// Package preflight says whether a device could get an image, before anything is offered to it. The firmware itself checks neither
// board nor project, and everything else only after the whole download, so that a wrong offer costs a flash, or the device.
//
// It is a leaf: it decides from what it is given. Sources are esp_ota_ops.c of ESP-IDF 5.5 for the choice of the slot, and ota.cc and
// application.cc of the firmware for versions and failed attempts.
package preflight

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"fleetd/internal/espimage"
)

// Severity is what a finding does.
type Severity string

// Severities.
const (
	Blocks Severity = "error"
	Waits  Severity = "wait" // until the device's next check
	Warns  Severity = "warning"
)

// Verdict is the sum of the findings.
type Verdict string

// Verdicts.
const (
	Fit     Verdict = "fit"
	Already Verdict = "already" // the device runs the image
	Waiting Verdict = "waits"
	Blocked Verdict = "blocked"
)

// Verdicts are all verdicts.
var Verdicts = []Verdict{Fit, Already, Waiting, Blocked}

// Finding is something about a device and an image. Text is a sentence.
type Finding struct {
	Code     Code
	Severity Severity
	Allow    bool // a job may allow it by its code
	Text     string
}

// Code is the stable name of a finding.
type Code string

// Codes of findings, beside those of espimage.Image.Warnings.
const (
	NotAdmitted   Code = "not_admitted"
	Unreadable    Code = "check_unreadable"
	Chip          Code = "chip"
	ChipRevision  Code = "chip_revision"
	FlashSize     Code = "flash_size"
	Slot          Code = "slot"
	Board         Code = "board"
	VersionAborts Code = "version_aborts"
	VersionEqual  Code = "version_equal"
	TooOld        Code = "version_too_old"
	Project       Code = "project"
	Layout        Code = "layout"
	OTAURL        Code = "ota_url"
	FirstCheck    Code = "first_check"
	ImageUnknown  Code = "image_unknown"
	NoWayBack     Code = "no_way_back"
	FactoryAndOTA Code = "factory_and_ota"
	BoardByHand   Code = "board_by_hand"
	Barred        Code = "barred"
)

// Device is what is known of a device.
type Device struct {
	Admitted  bool
	Readable  bool // the body of its last check could be read, and Revision to Slot are known
	SeenTwice bool // an earlier check showed the image that it runs

	Board, Version, ELF, Chip string
	Revision                  int   // of the chip, major*100+minor
	FlashSize                 int64 // bytes
	Project                   string
	Table                     []espimage.Partition
	Slot                      string // label of the partition with the running image
	Running                   *Image // what it runs; nil if that is not stored
	Bar                       string // why it gets no firmware for now, and what lifts that; empty: it may
}

// Image is an image that is stored.
type Image struct {
	*espimage.Image
	ELF    string   // 64 hex digits
	ByHand []string // boards that somebody set in place of those of the program; nil: none
}

// BoardsOf returns the boards that the image is for.
func (x *Image) BoardsOf() []string {
	if x.ByHand != nil {
		return x.ByHand
	}
	return x.Boards
}

// Judge returns whether a device could get an image, and everything that matters about that. server is the URL under which the
// device finds this fleet; an image whose program names another one may leave it. allow are codes of findings that only warn.
func Judge(d *Device, x *Image, server string, allow ...string) (Verdict, []Finding) {
	if d.ELF != "" && d.ELF == x.ELF {
		return Already, nil
	}
	j := judgment{d: d, x: x, server: server, allowed: allow}
	j.device()
	if d.Readable {
		j.hardware()
	}
	j.board()
	j.versions()
	j.address()
	for _, w := range j.x.Warnings() {
		if w.Code != espimage.WarnBoard { // without a board, it is blocked
			j.warns(Code(w.Code), "%s", w.Text)
		}
	}
	j.back()
	verdict := Fit
	for _, f := range j.findings {
		switch f.Severity {
		case Blocks:
			return Blocked, j.findings
		case Waits:
			verdict = Waiting
		}
	}
	return verdict, j.findings
}

type judgment struct {
	d        *Device
	x        *Image
	server   string
	allowed  []string
	findings []Finding
}

func (j *judgment) add(code Code, severity Severity, allow bool, format string, args ...any) {
	j.findings = append(j.findings, Finding{code, severity, allow, fmt.Sprintf(format, args...)})
}

func (j *judgment) blocks(code Code, format string, args ...any) {
	j.add(code, Blocks, false, format, args...)
}
func (j *judgment) allowable(code Code, format string, args ...any) {
	if slices.Contains(j.allowed, string(code)) {
		j.add(code, Warns, true, format, args...)
		return
	}
	j.add(code, Blocks, true, format+" To roll it out all the same, allow "+string(code)+".", args...)
}
func (j *judgment) warns(code Code, format string, args ...any) {
	j.add(code, Warns, false, format, args...)
}

// device judges what does not depend on the image.
func (j *judgment) device() {
	if !j.d.Admitted {
		j.blocks(NotAdmitted, "The device is not an admitted member of the fleet, or another client contests its id. Approve the right client first.")
	}
	if j.d.Bar != "" {
		j.blocks(Barred, "The device gets no firmware for now: %s.", j.d.Bar)
	}
	switch {
	case !j.d.Readable:
		j.blocks(Unreadable, "Its last OTA check did not say what hardware it has, as with a quote in the name of its Wi-Fi network or before fleetd kept this. Restart it; if that does not help, rename the network.")
	case !j.d.SeenTwice:
		j.add(FirstCheck, Waits, false, "Its last OTA check was the first one with the image that it runs, in which an offer fails or undoes the last upgrade. A rollout waits for the next check: restart the device, or leave that to the rollout.")
	}
}

// hardware judges chip, flash and partitions.
func (j *judgment) hardware() {
	d, x := j.d, j.x
	if chip := x.Chip.String(); d.Chip != chip {
		j.blocks(Chip, "The image is for the chip %s, and that of the device is %s. Use an image for its chip.", chip, orUnknown(d.Chip))
	} else if d.Revision < x.MinRevision || x.MaxRevision > 0 && d.Revision > x.MaxRevision {
		j.blocks(ChipRevision, "The image runs on revisions of the chip %s, and the device has %s. Use an image that was built for it.", x.Revisions(), espimage.Revision(d.Revision))
	}
	if x.FlashSize > d.FlashSize {
		j.blocks(FlashSize, "The image was built for a flash of %d MiB, and the device has %d MiB. Use an image for its flash.", x.FlashSize>>20, d.FlashSize>>20)
	}
	j.slots()
	j.layout()
	j.project()
}

func (j *judgment) project() {
	if j.d.Project != j.x.Project {
		j.allowable(Project, "The project of the image is %s, and that of what the device runs is %s.", orUnknown(j.x.Project), orUnknown(j.d.Project))
	}
}

// slots judges the partition to which the device would write.
func (j *judgment) slots() {
	var slots []espimage.Partition
	factory := false
	for _, p := range j.d.Table {
		factory = factory || p.IsFactory()
		if p.IsSlot() {
			slots = append(slots, p)
		}
	}
	if len(slots) < 2 {
		j.blocks(Slot, "The device has fewer than two slots for images, so that it takes no upgrade. Flash it by wire, with a partition table that has two.")
		return
	}
	if factory {
		j.warns(FactoryAndOTA, "The device has a factory image beside its slots. If that is another program, the device may start it instead: try one device first.")
	}
	slices.SortFunc(slots, func(a, b espimage.Partition) int { return int(a.Subtype) - int(b.Subtype) })
	next := slots[0] // as esp_ota_get_next_update_partition: the slot after the running one
	if at := slices.IndexFunc(slots, func(p espimage.Partition) bool { return p.Label == j.d.Slot }); at >= 0 {
		next = slots[(at+1)%len(slots)]
	}
	if j.x.Size > next.Size {
		j.blocks(Slot, "The image has %d bytes, and the slot %s has %d. The device would find that out after the whole slot was written. Build a smaller image, or flash the device by wire with larger slots.", j.x.Size, next.Label, next.Size)
	}
}

// firstAssets is the first major version that has its fonts and sounds in a partition of their own.
const firstAssets = 2

// layout compares the partitions that the image needs with those of the device, which no upgrade changes.
func (j *judgment) layout() {
	has := func(label string, size int64) bool {
		return slices.ContainsFunc(j.d.Table, func(p espimage.Partition) bool { return p.Label == label && p.Size >= size })
	}
	var missing []string
	for _, p := range j.x.Layout {
		if p.IsContent() && !has(p.Label, p.Size) {
			missing = append(missing, p.Label)
		}
	}
	version, _ := espimage.Version(j.x.Version)
	if j.x.Layout == nil && len(version) > 0 && version[0] >= firstAssets && !has("assets", 0) {
		missing = append(missing, "assets")
	}
	if len(missing) > 0 {
		j.allowable(Layout, "The device lacks partitions that the image was built for, or has smaller ones: %s. An upgrade does not change the table; flash it by wire.", strings.Join(missing, ", "))
	}
}

func (j *judgment) board() {
	boards := j.x.BoardsOf()
	switch {
	case len(boards) == 0:
		j.blocks(Board, "The image does not say for which board it was built. If you know them, set its boards (PATCH /v1/firmware/{id}).")
	case !slices.Contains(boards, j.d.Board):
		j.blocks(Board, "The image is for the board %s, and that of the device is %s. It would start, and be kept: use an image for its board.", strings.Join(boards, ", "), orUnknown(j.d.Board))
	}
	if j.x.ByHand != nil {
		j.warns(BoardByHand, "Somebody set the boards of the image; those that its program names are %s. Make sure that the device is one of the boards that were set.", orUnknown(strings.Join(j.x.Boards, ", ")))
	}
}

// IsForeign reports whether the program of an image checks in at another server.
func IsForeign(x *Image, server string) bool {
	return len(x.URLs) > 0 && !slices.ContainsFunc(x.URLs, func(literal string) bool { return hostOf(literal) == hostOf(server) })
}

// NeedsForce reports whether a device would take an image only with force: by its own comparison, the image is not newer. Versions
// that cannot be read need a judgment first.
func NeedsForce(d *Device, x *Image) bool {
	own, _ := espimage.Version(d.Version)
	offered, _ := espimage.Version(x.Version)
	return !espimage.Newer(own, offered)
}

// Offered is the version of an image as an offer has it: its numeric beginning.
func Offered(x *Image) string {
	parts, _ := espimage.Version(x.Version)
	text := make([]string, len(parts))
	for i, n := range parts {
		text[i] = strconv.Itoa(max(n, 0))
	}
	return strings.Join(text, ".")
}

// IsOld reports whether a failed offer restarts the device.
func IsOld(d *Device) bool {
	own, ok := espimage.Version(d.Version)
	return ok && espimage.IsTooOld(own)
}

// firstReplaceable is the first major version that takes an image whose version is the same text.
const firstReplaceable = 2

func (j *judgment) versions() {
	own, ok := espimage.Version(j.d.Version)
	switch {
	case !ok:
		j.blocks(VersionAborts, "The device runs the version %q, which aborts the firmware when it compares an offer with it: it would restart for as long as there is one. Flash it by wire.", j.d.Version)
	case espimage.IsTooOld(own):
		j.allowable(TooOld, "The version of what the device runs is %s. Before v1.8.0 a failed upgrade restarts the device, for as long as it is offered: flash it by wire.", orUnknown(j.d.Version))
	case own[0] < firstReplaceable && j.d.Version == j.x.Version:
		j.blocks(VersionEqual, "The device and the image have the version %s, and firmware before v2.0.0 refuses an image with the version that it has. Build it with another one.", j.x.Version)
	}
}

// address judges where the program checks in, unless the device has another URL in its settings, which nobody can know.
func (j *judgment) address() {
	if IsForeign(j.x, j.server) && (j.d.Running == nil || !IsForeign(j.d.Running, j.server)) {
		j.allowable(OTAURL, "The image checks in at %s, unless the device has another URL in its settings, and this fleet is at %s. The device may be gone after the upgrade: build the image for this fleet.", j.x.URLs[0], j.server)
	}
}

// back judges whether the image that the device runs could be given to it again.
func (j *judgment) back() {
	running := j.d.Running
	if running == nil {
		j.warns(ImageUnknown, "The image that the device runs is not stored, so that the device cannot get it back. Add it first (`fleetd firmware add`).")
		return
	}
	after := *j.d
	after.Project, after.Running = j.x.Project, j.x
	again := judgment{d: &after, x: running, server: j.server, allowed: j.allowed} // a rollback inherits what its job allowed
	again.board()
	again.address()
	if after.Readable {
		again.layout()
		again.project()
	}
	for _, f := range again.findings {
		if f.Severity == Blocks {
			j.warns(NoWayBack, "The device could not get the image back that it runs: that would be blocked by %s. Try one device first.", f.Code)
			return
		}
	}
}

// hostOf returns the host and the port of a URL, in one form.
func hostOf(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return text
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return strings.ToLower(u.Hostname()) + ":" + port
}

func orUnknown(text string) string {
	if text == "" {
		return "unknown"
	}
	return text
}
