package devices

import (
	"encoding/json"
	"time"

	"fleetd/internal/jsonspan"
)

// Bounds of what is kept of images.
const (
	// MaxImages is how many images are kept of each device's history.
	MaxImages = 20
	// MaxDetails is how long the details of a check may be, in bytes; the firmware's have about 700.
	MaxDetails = 4 << 10
)

// UnreadableDetails are the details of a check whose body could not be read.
const UnreadableDetails = `{"unreadable":true}`

// Details are what a device says of its hardware and its image beside Facts, with the names of the OTA body. They are not in memory:
// only checks of images need them.
type Details struct {
	Unreadable bool  `json:"unreadable"`
	FlashSize  int64 `json:"flash_size"` // bytes
	Chip       struct {
		Revision int `json:"revision"` // major*100+minor
	} `json:"chip_info"`
	Application struct {
		Project     string `json:"name"`
		CompileTime string `json:"compile_time"`
		IDF         string `json:"idf_version"`
	} `json:"application"`
	Table []struct {
		Label   string `json:"label"`
		Type    uint8  `json:"type"`
		Subtype uint8  `json:"subtype"`
		Address int64  `json:"address"`
		Size    int64  `json:"size"`
	} `json:"partition_table"`
	OTA struct {
		Label string `json:"label"` // of the running slot
	} `json:"ota"`
	Display struct {
		Width  int `json:"width"`
		Height int `json:"height"`
	} `json:"display"`
}

// ParseDetails reads the details of a check; those that are not of the firmware's form are unreadable.
func ParseDetails(text string) Details {
	var d Details
	if json.Unmarshal([]byte(text), &d) != nil {
		return Details{Unreadable: true}
	}
	return d
}

// DeviceImage is an entry of the history of a device's images.
type DeviceImage struct {
	Seq     int64 // from 1
	ELF     string
	Version string
	Board   string
	Details string // of the last check with it; empty if that was before they were kept
	Cause   ImageCause
	At      time.Time // of the first check with it
	// SeenTwice means that more than one check showed it. It is set for the newest one alone.
	SeenTwice bool
}

// ImageCause is why a device has another image.
type ImageCause string

// Causes of images.
const (
	CauseForeign    ImageCause = "foreign" // fleetd did not give it
	CauseJob        ImageCause = "job"     // a firmware job gave it
	CauseRolledBack ImageCause = "rolled_back"
)

// ImageChange is a check that showed another image than the last one.
type ImageChange struct {
	Device ID
	From   DeviceImage
	To     DeviceImage
}

// Event is the event of the change.
func (c *ImageChange) Event() Event {
	image := func(dst []byte, name string, i *DeviceImage) []byte {
		dst = jsonspan.AppendString(append(dst, name...), i.Version)
		return append(jsonspan.AppendString(append(dst, `,"elf_sha256":`...), i.ELF), '}')
	}
	fields := image(nil, `"from":{"version":`, &c.From)
	fields = image(fields, `,"to":{"version":`, &c.To)
	fields = jsonspan.AppendString(append(fields, `,"board":`...), c.To.Board)
	fields = jsonspan.AppendString(append(fields, `,"cause":`...), string(c.To.Cause))
	return Event{Kind: EventFirmware, Device: c.Device, Time: c.To.At, Fields: fields, MsgID: c.Device.Token() + "-firmware-" + c.To.At.Format("20060102150405.000000")}
}
