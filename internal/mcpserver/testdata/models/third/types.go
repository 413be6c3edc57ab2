package models

import "fleetd/internal/mcpserver/testdata/models"

// The policy is written for these names.
type (
	Host    = models.Host
	Request = models.Request
	Want    = models.Want
	Said    = models.Said
)
