package firmware

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	// firstPiece is how many bytes of an image the first read must yield before v2.2.0: without a whole header,
	// esp_ota_write runs without a handle (v1.9.4 ota.cc:294-348).
	firstPiece = 288
	// secondProgram is how much later an image that crashes after its OTA check does so.
	secondProgram = 5 * time.Second
)

// slotState is esp_ota_img_states_t: what the bootloader thinks of the image in a slot.
type slotState uint8

const (
	slotValid slotState = iota // confirmed, or from the factory
	slotNew
	slotPending
	slotAborted
)

func (s slotState) String() string {
	return [...]string{"valid", "new", "pending_verify", "aborted"}[s]
}

// slots are the two application slots and the choice between them (otadata). They survive restarts. A device that was never
// upgraded has none. Not safe for concurrent use.
type slots struct {
	programs [2]*program
	states   [2]slotState
	running  int
	next     int // the slot that the bootloader tries
	powerCut bool
}

var (
	// errPowerCut ends a download as the fault power-cut does.
	errPowerCut = errors.New("the power was cut during the download")
	errCut      = errors.New("the device's network broke off during the download")
)

// isBefore compares versions that are known to be readable.
func isBefore(version, other string) bool {
	newer, _ := newerVersion(version, other)
	return newer
}

// load is the bootloader: it chooses the image to run. One that was not confirmed before this restart is never run again
// (ESP-IDF bootloader_utility.c, CONFIG_BOOTLOADER_APP_ROLLBACK_ENABLE).
func (d *Device) load() {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.slots
	if s == nil {
		return
	}
	switch s.states[s.next] {
	case slotNew:
		s.states[s.next] = slotPending
	case slotPending:
		s.states[s.next] = slotAborted
		s.next = 1 - s.next
		d.stats.rollbacks++
	}
	s.running = s.next
	d.runs = s.programs[s.running]
}

// confirm is esp_ota_mark_app_valid_cancel_rollback, after an OTA check that succeeded (main/ota.cc:247-265).
func (d *Device) confirm() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.slots; s != nil && s.states[s.running] == slotPending {
		s.states[s.running] = slotValid
	}
}

// crashes restarts a device that has the fault and does not run the image that it left the factory with.
func (d *Device) crashes(f fault) bool {
	d.mu.Lock()
	crash := d.faults.has(f) && d.runs.elf != d.profile.factory.elf
	if crash {
		d.stats.crashes++
		d.problem = "the image " + d.runs.version + " crashed"
	}
	d.mu.Unlock()
	if crash {
		d.reboot()
	}
	return crash
}

// upgrade is Application::UpgradeFirmware: the open channel is closed first, and success ends in a restart. It reports
// whether the device restarts.
func (d *Device) upgrade(ctx context.Context, url string) bool {
	d.closeChannel()
	if !d.sleep(4 * time.Second) {
		return false
	}
	err := d.install(ctx, url)
	if err == nil {
		d.reboot()
		return true
	}
	d.mu.Lock()
	d.stats.failedUpgrades++
	d.problem = "firmware upgrade failed: " + err.Error()
	d.mu.Unlock()
	if errors.Is(err, errPowerCut) {
		d.reboot()
		return true
	}
	d.sleep(3 * time.Second)
	return false
}

// upgradeByTool is self.upgrade_firmware. A failure leaves the device in a state in which button and wake word do
// nothing, until somebody restarts it (main/application.cc:1057-1083).
func (d *Device) upgradeByTool(url string) {
	if d.upgrade(d.fleet.ctx, url) {
		return
	}
	d.mu.Lock()
	d.upgrading = true
	d.setLifeLocked(StateUpgrading, "")
	d.mu.Unlock()
}

// install is Ota::Upgrade: it downloads an image into the slot that does not run, and has it booted next. What the device
// finds out only after the whole download is found out then.
func (d *Device) install(ctx context.Context, url string) error {
	raw, err := d.loadImage(ctx, url)
	if err != nil {
		return err
	}
	next, err := readImage(raw)
	switch {
	case err != nil:
		return err
	case d.faults.has(faultRejectImage):
		return errors.New("image refused: its eFuse block revision does not fit")
	case d.faults.has(faultWrongBoard) && next.elf != d.profile.factory.elf:
		next.board += "-other"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.slots
	other := 1 - s.running
	s.programs[other], s.states[other], s.next = next, slotNew, other
	d.stats.upgrades++
	return nil
}

// loadImage is the part of Ota::Upgrade that reads, by the rules of the version that runs (main/ota.cc:267-387).
func (d *Device) loadImage(ctx context.Context, url string) (raw []byte, err error) {
	d.mu.Lock()
	if d.slots == nil {
		d.slots = &slots{programs: [2]*program{d.runs, nil}}
	}
	s := d.slots
	pending, version := s.states[s.running] == slotPending, d.runs.version
	d.mu.Unlock()
	call, err := d.get(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = call.close() }()
	size, room := call.answer.ContentLength, int64(d.profile.slot().size)
	started := 4096 // v2.2.0 and later begin with a page
	if isBefore(version, "2.2.0") {
		started = 1
	}
	begun := false
	err = call.pieces(func(piece []byte) error {
		if len(raw) == 0 && started == 1 && len(piece) < firstPiece && int64(len(piece)) < size {
			return fmt.Errorf("the first read has %d bytes: no handle to write with", len(piece))
		}
		raw = append(raw, piece...)
		d.mu.Lock()
		d.stats.downloadBytes += uint64(len(piece))
		cut := d.faults.has(faultPowerCut) && !s.powerCut && int64(len(raw)) >= size/2
		s.powerCut = s.powerCut || cut
		d.mu.Unlock()
		switch {
		case cut:
			return errPowerCut
		case d.faults.has(faultCutDownload) && int64(len(raw)) >= size/2:
			return errCut
		case int64(len(raw)) > room:
			return errors.New("the slot is full")
		case begun || len(raw) < started && int64(len(raw)) < size:
			return nil
		}
		begun = true
		return d.begin(raw, version, pending)
	})
	return raw, err
}

// begin is what the device looks at before it writes: esp_ota_begin, and the version up to v1.9.4 (v1.9.4 ota.cc:326-341).
func (d *Device) begin(head []byte, version string, pending bool) error {
	const at = imageHeaderSize + segmentHeaderSize + 16
	if isBefore(version, "2.0.0") && len(head) >= at+32 && string(head[at:at+len(version)+1]) == version+"\x00" {
		return errors.New("the image has the version that runs")
	}
	if pending {
		return errors.New("the running image is not confirmed yet: ESP_ERR_OTA_ROLLBACK_INVALID_STATE")
	}
	if head[0] != imageMagic {
		return errors.New("the first byte is not that of an image")
	}
	return nil
}

// get requests an image or a picture; its length must be announced.
func (d *Device) get(ctx context.Context, url string) (*httpCall, error) {
	call, err := openHTTP(ctx, d.fleet.dialer, d.index, "GET", url, nil, nil)
	if err != nil {
		return nil, err
	}
	status, err := call.status()
	switch {
	case err != nil:
	case status != 200:
		err = toolError("Unexpected status code: " + strconv.Itoa(status))
	case call.answer.ContentLength <= 0:
		err = errors.New("answer without Content-Length")
	default:
		return call, nil
	}
	return nil, errors.Join(err, call.close())
}

// otaURL is where the device checks: the settings have the address of Options, unless the fault leaves them empty.
func (d *Device) otaURL() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.faults.has(faultForeignServer) && d.runs.ota != "" {
		return d.runs.ota
	}
	return d.fleet.options.OTA
}
