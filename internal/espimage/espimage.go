// Package espimage reads firmware files of ESP32 chips, as people have them: an application image, a merged binary (the content of a
// whole flash), or a release zip with such files. It says what an image is, for which board and chip it was built, and what the
// bootloader or the firmware's own updater would refuse about it.
//
// It is a leaf: it knows neither devices nor a store, and it trusts nothing that a file says. It reads a stream in windows of 64 KiB, so
// that its memory does not depend on the file.
//
// Sources: esp_app_format.h, esp_app_desc.h and esp_image_format.c of ESP-IDF 5.5, gen_esp32part.py for the partition table, and
// ota.cc, mcp_server.cc and assets.cc of the firmware.
package espimage

import (
	"fmt"
	"time"
)

// Image is an application image: what runs from an app partition. As JSON it is what a store keeps of a fit one beside its two
// hashes.
type Image struct {
	File   string // the file in a zip that has it; empty outside of one
	Merged bool   // it was cut out of the content of a whole flash

	SHA256 [32]byte `json:"-"` // of all bytes of the image, with its hash and its signature; its identity
	Size   int64    // bytes

	Chip                     Chip
	MinRevision, MaxRevision int   // of the chip, major*100+minor; MaxRevision 0: any
	FlashSize                int64 // of the chip's flash, bytes, for which it was built

	Project       string
	Version       string
	IDF           string // version of ESP-IDF
	Built         time.Time
	ELF           [32]byte `json:"-"` // SHA-256 of the ELF file: the only identity of a build that a device reports
	SecureVersion uint32
	Signature     Signature

	Boards []string    // names of the boards that it reports in `initialize`, as literals of the program
	URLs   []string    // OTA URLs of the program
	Layout []Partition // the partition table of a merged binary

	Faults []Fault `json:"-"` // why no device can run it, or must not get it; empty if it is fit
}

// Signature is the kind of a signature at the end of an image.
type Signature string

// Signatures. They are recognized, not verified: the chip has the key.
const (
	SignatureNone Signature = ""
	SignatureV1   Signature = "secure boot v1"
	SignatureV2   Signature = "secure boot v2"
)

// Fault is what is wrong with a file or an image.
type Fault struct {
	Code string
	Text string // a sentence that says what to do
	File string // in a zip; empty outside of one
}

// Codes of faults.
const (
	FaultUnknown   = "unknown_format"
	FaultTruncated = "truncated"
	FaultSegments  = "segments"
	FaultChecksum  = "checksum"
	FaultHash      = "hash"
	FaultNoApp     = "no_application"
	FaultDesc      = "no_description"
	FaultChip      = "chip_unknown"
	FaultAborts    = "version_aborts"
	FaultTooOld    = "version_too_old"
	FaultAssets    = "assets_alone"
	FaultTable     = "partition_table"
	FaultZip       = "zip"
	FaultTooLarge  = "too_large"
)

// fault is an error that is a Fault.
func fault(code, format string, args ...any) *Fault {
	return &Fault{Code: code, Text: fmt.Sprintf(format, args...)}
}

func (f *Fault) Error() string { return f.Text }

// Chip is the chip_id of an image (esp_chip_id_t).
type Chip uint16

var chipNames = map[Chip]string{0: "esp32", 2: "esp32s2", 5: "esp32c3", 9: "esp32s3", 12: "esp32c2", 13: "esp32c6", 16: "esp32h2", 18: "esp32p4", 20: "esp32c61", 23: "esp32c5"}

// String is the name that devices report as `chip_model_name`, or the number.
func (c Chip) String() string {
	if name := chipNames[c]; name != "" {
		return name
	}
	return fmt.Sprintf("chip %d", uint16(c))
}

// Revision is a revision of a chip, major*100+minor, as people write it.
func Revision(n int) string { return fmt.Sprintf("%d.%d", n/100, n%100) }

// Revisions are the revisions of the chip on which the image runs, as people write them.
func (image *Image) Revisions() string {
	if image.MaxRevision == 0 {
		return "from " + Revision(image.MinRevision)
	}
	return Revision(image.MinRevision) + " to " + Revision(image.MaxRevision)
}

// File is what a file has.
type File struct {
	Images []*Image
	// Dropped are things beside the images, in words: they are not kept.
	Dropped []string
	// Faults are those of the file; an image has its own.
	Faults []Fault
}

// IsFit reports whether the file has an image and neither it nor one of these has a fault.
func (f *File) IsFit() bool { return len(f.Images) > 0 && len(f.AllFaults()) == 0 }

// AllFaults returns the faults of the file and of its images.
func (f *File) AllFaults() []Fault {
	all := f.Faults
	for _, image := range f.Images {
		all = append(all[:len(all):len(all)], image.Faults...)
	}
	return all
}

// Warnings returns what somebody should know before an image is used; nothing of it keeps devices from running it.
func (image *Image) Warnings() (warnings []Fault) {
	warn := func(code, format string, args ...any) {
		warnings = append(warnings, *fault(code, format, args...))
	}
	if len(image.Boards) == 0 {
		warn(WarnBoard, "The image does not say for which board it was built. Make sure that it is for yours: an image of another board starts, and stays.")
	}
	if len(image.URLs) == 0 {
		warn(WarnURL, "No OTA URL was found in the image. A device that has none in its settings may check in elsewhere after the upgrade: try one device first.")
	}
	if IsPrerelease(image.Version) {
		warn(WarnPrerelease, "The firmware reads the version %s as its numbers alone, so that a device with it does not take the release for newer. Rollouts of this fleet give it the release all the same.", image.Version)
	}
	return warnings
}

// Codes of warnings.
const (
	WarnBoard      = "board_unknown"
	WarnURL        = "ota_url_unknown"
	WarnPrerelease = "prerelease"
)
