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
	AddedBy string `json:"added_by,omitempty" doc:"This is the name of the key that added the image."`
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
