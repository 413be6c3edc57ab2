package api

// FirmwareImage is an application image: what a device runs from one of its slots.
type FirmwareImage struct {
	ID            string         `json:"id" doc:"SHA-256 of the image, 64 hex digits. Twelve digits name it where one image is expected."`
	File          string         `json:"file,omitempty" doc:"The file of a zip that has it."`
	Kind          string         `json:"kind" enum:"application,merged" doc:"merged means that it was cut out of the content of a whole flash."`
	Project       string         `json:"project"`
	Version       string         `json:"version"`
	Boards        []string       `json:"boards" nullable:"false" doc:"The boards for which it was built, as its program says."`
	Chip          string         `json:"chip" example:"esp32s3"`
	ChipRevision  string         `json:"chip_revision" doc:"The revisions of the chip that it runs on, such as 0.0 to 0.99."`
	FlashSize     int64          `json:"flash_size" doc:"It was built for a flash of this size in bytes."`
	ELF           string         `json:"elf_sha256" doc:"SHA-256 of its ELF file, by which a device names what it runs."`
	Size          int64          `json:"size" doc:"It has this size in bytes."`
	Layout        []Partition    `json:"layout,omitempty" doc:"The partition table of a merged binary."`
	OTAURL        string         `json:"ota_url" doc:"The program checks in at this URL, unless the device has another one in its settings. It is empty if none was found."`
	SecureVersion uint32         `json:"secure_version"`
	IDFVersion    string         `json:"idf_version"`
	BuiltAt       Time           `json:"built_at" doc:"It is null if the build left it out."`
	Signature     string         `json:"signature,omitempty" doc:"It is signed for this kind of secure boot. The chip alone has the key."`
	Findings      []ImageFinding `json:"findings" nullable:"false"`
	StoredImage
}

// StoredImage is what a fleet knows of an image that it keeps.
type StoredImage struct {
	Note    string `json:"note,omitempty"`
	AddedBy string `json:"added_by,omitempty" doc:"This is the name of the key that added the image. Keys that are limited to devices or tools do not see it."`
	AddedAt Time   `json:"added_at,omitzero"`
	Devices *int64 `json:"devices,omitempty" doc:"So many devices ran an image with this elf_sha256 at their last OTA check. A key that is limited to devices does not get the number."`
}

// AddedFirmware is what became of a file that was added.
type AddedFirmware struct {
	Items   []FirmwareImage `json:"items" nullable:"false" doc:"The images of the file, those that were known included."`
	Dropped []string        `json:"dropped" nullable:"false" doc:"These things are in the file beside the images, and were not kept."`
}

// FirmwareEdit changes what people say about an image. Members that are left out stay as they are.
type FirmwareEdit struct {
	Note   *string   `json:"note,omitempty" maxLength:"1000"`
	Boards *[]string `json:"boards,omitempty" maxItems:"16" doc:"The image is for these boards, whatever its program says; every check then has the finding board_by_hand. An empty list restores what the program says."`
}

// FirmwareFinding is something about a device and an image that it might get.
type FirmwareFinding struct {
	Code     string `json:"code"`
	Severity string `json:"severity" enum:"error,wait,warning" doc:"error keeps the device from getting the image; wait does so for now."`
	Allow    bool   `json:"allow,omitempty" doc:"A job may allow it, by its code."`
	Text     string `json:"text"`
}

// FirmwareVerdict is whether a device could get an image.
type FirmwareVerdict struct {
	Device   string            `json:"device"`
	Board    string            `json:"board"`
	Firmware string            `json:"firmware" doc:"The device runs this version."`
	Image    string            `json:"image" doc:"The verdict is about this image. It is empty if no image of the release is for the board."`
	Verdict  string            `json:"verdict" enum:"fit,already,waits,blocked"`
	Findings []FirmwareFinding `json:"findings" nullable:"false"`
}

// FirmwareCheck says which devices of a selection could get an image, or the images of a release.
type FirmwareCheck struct {
	Counts     *FirmwareCounts   `json:"counts,omitempty" doc:"The counts are of all devices of the selection. The first page alone has them."`
	Items      []FirmwareVerdict `json:"items" nullable:"false"`
	NextCursor string            `json:"next_cursor"`
}

// FirmwareCounts counts devices by what a check said of them.
type FirmwareCounts struct {
	Devices  int64            `json:"devices"`
	Verdicts map[string]int64 `json:"verdicts" doc:"Devices by verdict."`
	Findings map[string]int64 `json:"findings" doc:"Devices by code of a finding. A device may have several."`
}

// DeviceFirmware is what a device runs, and what it could get.
type DeviceFirmware struct {
	Device   string           `json:"device"`
	Board    string           `json:"board"`
	Firmware string           `json:"firmware"`
	ELF      string           `json:"elf_sha256"`
	Image    string           `json:"image" doc:"The id of the image that it runs. It is empty if that is not stored."`
	Facts    *DeviceFacts     `json:"facts,omitempty" doc:"It is left out if the last OTA check could not be read, or was answered before fleetd kept it."`
	History  []DeviceImage    `json:"history" nullable:"false" doc:"The images that it had, newest first, at most 20."`
	Check    *FirmwareVerdict `json:"check,omitempty" doc:"With image, whether it could get that."`
	Bar      string           `json:"bar" doc:"It says why the device gets no firmware for now. It is empty if it may."`
	Last     *Task            `json:"last,omitempty" doc:"The firmware task that runs on the device, else the one that waits first, else the one that ended last, if it had begun."`
}

// DeviceFacts are what a device said of its hardware and its image at its last OTA check.
type DeviceFacts struct {
	Project      string      `json:"project"`
	CompileTime  string      `json:"compile_time"`
	IDFVersion   string      `json:"idf_version"`
	ChipRevision string      `json:"chip_revision" example:"0.2"`
	FlashSize    int64       `json:"flash_size" doc:"The flash has this size in bytes."`
	Slot         string      `json:"slot" doc:"This partition has the image that runs."`
	Layout       []Partition `json:"layout" nullable:"false"`
	Display      string      `json:"display" example:"320x240" doc:"It is empty if the device has none or did not say it."`
}

// DeviceImage is an image that a device had.
type DeviceImage struct {
	ELF     string `json:"elf_sha256"`
	Image   string `json:"image" doc:"The id of the stored image. It is empty if there is none."`
	Version string `json:"version"`
	Board   string `json:"board"`
	Cause   string `json:"cause" doc:"Why it came: job, a firmware job gave it; rolled_back, the device went back to it during such a job; foreign, fleetd did not give it. It is empty for the first one that is known." enum:",job,rolled_back,foreign"`
	At      Time   `json:"at" doc:"The first OTA check with it was at this time."`
}

// Partition is an entry of a partition table.
type Partition struct {
	Label   string `json:"label"`
	Type    int    `json:"type" doc:"0 is an application, 1 is data."`
	Subtype int    `json:"subtype" doc:"Of an application, 0 is the factory image and 16 the first slot for upgrades."`
	Offset  int64  `json:"offset"`
	Size    int64  `json:"size"`
}

// ImageFinding is something about an image that matters to whoever wants to use it.
type ImageFinding struct {
	Code     string `json:"code"`
	Severity string `json:"severity" enum:"error,warning"`
	Text     string `json:"text"`
}

// FirmwareFile is what a firmware file has.
type FirmwareFile struct {
	File     string          `json:"file"`
	Images   []FirmwareImage `json:"images" nullable:"false"`
	Dropped  []string        `json:"dropped" nullable:"false" doc:"These things are in the file beside the images, and are not kept."`
	Findings []ImageFinding  `json:"findings" nullable:"false" doc:"Those of the file. Each image has its own."`
}
