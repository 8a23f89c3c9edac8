"""What leaves normlab for readers without it.

images      figures as image files
notebooks   executed notebooks as web pages, and as notebooks that hold plain images (needs nbconvert)
"""

from normlab.export.images import NO_BROWSER, image_bytes, save_images

__all__ = ["NO_BROWSER", "image_bytes", "save_images"]
